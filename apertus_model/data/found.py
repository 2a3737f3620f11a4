"""What a parser of documents may say about a file.

Invariant: a parser yields a document or a counted `Rejection`, or it raises. What means that the file is damaged is an OSError, an
EOFError, `Damaged` or an error of the library that reads it; what means that the spec describes another file is `NotAsStated`. Neither
names the file: `apertus_model.data.documents` does.
"""

from __future__ import annotations

import lzma
import zlib
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

import pyarrow

Scalar = str | int | float | bool | None
DOCUMENT_BYTES = 2**28
"""Of a line of JSON, and of a file that is one document or is parsed whole: a longer one is a rejection, and is not held in
memory, whatever it was compressed to."""


class Rejection(NamedTuple):
    """Something that should have been a document and is not; `reason` is the name it is counted under."""

    reason: str


class SourceDocument(NamedTuple):
    """A document: its text, the identifier that its source gives it, and what else the spec asks for (`SourceSpec.metadata`)."""

    text: str
    id: str | None
    metadata: dict[str, Scalar]


Parsed = Iterator[str | SourceDocument | Rejection]
FoundDocuments = Iterator[SourceDocument | Rejection]


def whole(file: BinaryIO) -> bytes | Rejection:
    """All of a file, which may be longer than DOCUMENT_BYTES."""
    content = file.read(DOCUMENT_BYTES + 1)
    return content if len(content) <= DOCUMENT_BYTES else Rejection("too_large")


class Damaged(Exception):
    """A file that is no whole file of its format; says where."""


UNREADABLE = (OSError, EOFError, zlib.error, lzma.LZMAError, pyarrow.ArrowException, UnicodeDecodeError, MemoryError, Damaged)
"""What parsers raise for bytes that are not what they should be; also in names of columns, and as sizes beyond reason."""


class NotAsStated(Exception):
    """A file that can be read and is not what the spec says. `place`: where in the file, as `line 3`; `fix`: the field to correct."""

    def __init__(self, found: str, fix: str, place: str = "") -> None:
        super().__init__(found, fix, place)
        self.found, self.fix, self.place = found, fix, place


def encodable(text: str) -> str | Rejection:
    """The text, unless an escape in it spelled half a surrogate pair, which no encoding stores."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return Rejection("not_utf8")
    return text
