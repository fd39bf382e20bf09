"""How trainings are started: the configuration of Accelerate's guide, and what it means for processes and threads."""
