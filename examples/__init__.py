"""Code of the miniature recipes alone: readers of text that every Python installation has, and a task."""
