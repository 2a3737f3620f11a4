"""Calls of the filesystem that a store lies on: tried again, timed, atomic."""
