"""Imports without the garbage collector, which takes a quarter of the time of importing torch, and a tenth of
that of the planner."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Turns the garbage collector off inside the block. Afterwards the collector ignores all objects that
    exist by then: they stay as long as the process, and a fork does not copy their pages."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
