"""Snapshots of the data sets that tasks of lm-evaluation-harness read, a model that answers, and both run."""
