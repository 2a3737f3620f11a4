"""Reads what is committed: artifacts and checkpoints, parts of their files, and what they were made from."""
