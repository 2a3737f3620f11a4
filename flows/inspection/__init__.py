"""Shows what became of data, with one inspector per kind of artifact."""
