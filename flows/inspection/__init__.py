"""What became of data: one inspector per kind of artifact."""
