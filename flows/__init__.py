"""In which order: plans, the Prefect flow, the command line; and `open_run`, which reads stored results."""

from typing import Any

__all__ = ["open_run"]


def __getattr__(name: str) -> Any:
    """Imports `open_run` when it is asked for, so that the command line starts without it."""
    if name != "open_run":
        raise AttributeError(f"module 'flows' has no attribute '{name}'")
    from flows.stored_run import open_run

    return open_run
