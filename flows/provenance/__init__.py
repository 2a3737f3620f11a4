"""Where things come from and how two of them differ: lineage, comparison, branches, copies."""
