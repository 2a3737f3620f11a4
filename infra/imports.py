"""Imports without the garbage collector, which takes a quarter of the time of importing torch."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Inside the block nothing is collected. Afterwards the collector never looks at what is there now, which
    stays as long as the process; so a fork does not copy the pages of these objects."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
