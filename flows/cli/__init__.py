"""The `apertus` command line: the app, its commands, what they print."""
