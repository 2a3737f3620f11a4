"""Classifiers of documents: what they read, how they are trained, measured and stored, and how they score."""
