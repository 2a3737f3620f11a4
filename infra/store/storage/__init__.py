"""Makes the calls of the filesystem that a store is on: tried again, timed, atomic."""
