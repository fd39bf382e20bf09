"""What a run leaves behind: one file of JSON lines for each rank, and how it is read again."""
