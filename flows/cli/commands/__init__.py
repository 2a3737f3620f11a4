"""Commands of the terminal by topic; each module registers its own on `flows.cli.app`."""
