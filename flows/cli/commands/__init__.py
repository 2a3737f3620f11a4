"""Commands of the terminal by topic; each module registers its own on `flows.cli.app`.

Invariant: a module loads what a command works with inside the command, so that help and the completion of a
shell load no spec, no planner and no store.
"""
