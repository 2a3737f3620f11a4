"""The origins of artifacts, and the differences between them: lineage, comparison, branches, copies."""
