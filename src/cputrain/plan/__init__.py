"""Answers before a run: memory, time, the largest batch, what another recipe or more machines would change."""
