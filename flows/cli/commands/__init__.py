"""Commands of the terminal by topic; each module registers its own on `flows.cli.app`.

Invariant: a module loads what a command works with inside it: help and completion load no spec or store.
"""
