"""What only the miniature recipes use: readers of text that every Python installation has, and a task."""
