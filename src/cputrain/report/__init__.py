"""What records of runs show: figures, charts, a page without scripts, and a text."""
