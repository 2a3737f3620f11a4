"""Commands of the terminal by topic; each module registers its own on the app of `flows.cli`."""
