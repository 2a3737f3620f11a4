"""The `apertus` command line: the app, its commands and their output."""
