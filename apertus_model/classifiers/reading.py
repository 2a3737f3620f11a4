"""Documents of a source for classifiers, in windows of bounded memory.

Invariant: documents come in the order of the files, without the rejected ones, as the corpus reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from apertus_model.data.documents import Rejection, open_source, read_documents
from apertus_model.data.duplicates import text_hash
from apertus_model.data.found import Scalar, batches
from specs.sources import SourceSpec

WINDOW_DOCUMENTS = 4096
WINDOW_CHARACTERS = 2**24


class ReadDocument(NamedTuple):
    """A document as a classifier sees it."""

    file: str  # path in the source
    hash: int  # of the whole text
    text: str  # cut
    columns: dict[str, Scalar]


def read_source(source: SourceSpec, files: Iterable[str], characters: int) -> Iterator[ReadDocument]:
    """The documents of some files of a source, cut to their first `characters`. A source with a limit has to
    be read as a whole."""
    fs, root = open_source(source)
    count = 0
    for path in files:
        for found in read_documents(source, fs, root, path):
            if isinstance(found, Rejection):
                continue
            if count == source.limit:
                return
            yield ReadDocument(path, text_hash(found.text), found.text[:characters], found.metadata)
            count += 1


def windows(documents: Iterable[ReadDocument]) -> Iterator[list[ReadDocument]]:
    """Consecutive documents, as many as may be in memory together."""
    return batches(documents, WINDOW_DOCUMENTS, WINDOW_CHARACTERS)
