"""Writes the content of one file with its digests, and compares it with them when it is read."""
