"""Checkpoints of a run: files that are whole or not there, and what a run must have in common with the one it goes on from."""
