"""Readers from installed packages, for a user's own formats; a recipe names one as
`reader: package.module:name`.

A reader is a function of an open binary file (decompressed), the source, and the path of the file below the
source's url. It yields what a parser of `parsed.py` yields or, for a source of conversations,
`Conversation` or `Rejection`. Its results depend on nothing else; the recipe states the reader's version,
which is raised when its results change.

Invariant: a reader is imported when its first file is read, by the stage, and nowhere else.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any, BinaryIO

from apertus_model.data.documents.parsed import UNREADABLE, NotAsStated
from infra.store.inputs import SourceError
from specs.sources import SourceSpec


def read_installed(source: SourceSpec, file: BinaryIO, path: str) -> Iterator[Any]:
    """The results of a source's reader for a file. SourceError when the reader is not importable or fails."""
    assert source.reader is not None
    module, _, name = source.reader.partition(":")
    try:
        reader = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise SourceError(
            f"the reader {source.reader} cannot be imported: {error}. Fix: install its package, or correct"
            " the name"
        ) from error
    try:
        yield from reader(file, source, path)
    except (*UNREADABLE, NotAsStated):
        raise
    except Exception as error:  # a user's function can raise anything
        raise SourceError(
            f"the reader {source.reader} failed at '{path}' of {source.url}: {type(error).__name__}: {error}"
        ) from error
