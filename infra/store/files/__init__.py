"""The content of one file: written with its digests, and compared with them when it is read."""
