"""Statistics of evaluations."""
