"""Turns text on any file system into training samples: document readers, token files, sample order and
Goldfish masks."""
