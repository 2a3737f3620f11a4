"""The results and errors of document parsers.

Invariant: a parser yields a document or a counted `Rejection`, or it raises. A damaged file is an OSError, an
EOFError, `Damaged` or an error of the library that reads it; a file that contradicts the spec is
`NotAsStated`. Neither names the file: `apertus_model.data.documents.readers` does.
"""

import lzma
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import BinaryIO, NamedTuple, Protocol, TypeVar

import pyarrow

from specs.sources import SourceSpec

Scalar = str | int | float | bool | None
TOO_LARGE = "too_large"
"""The name under which documents above `SourceSpec.max_document_bytes` are counted."""


class Rejection(NamedTuple):
    """A malformed document."""

    reason: str  # the name under which it is counted
    id: str = ""  # of a malformed conversation, if its row has one
    problem: str = ""  # what is wrong, for the table of rejects


class SourceDocument(NamedTuple):
    """A document."""

    text: str
    id: str | None  # in its source
    metadata: dict[str, Scalar]  # the columns of `SourceSpec.metadata`


class HasText(Protocol):
    """A document of any kind."""

    @property
    def text(self) -> str: ...


Some = TypeVar("Some", bound=HasText)
Parsed = Iterator[str | SourceDocument | Rejection]
FoundDocuments = Iterator[SourceDocument | Rejection]


def batches(documents: Iterable[Some], most: int, characters: int) -> Iterator[list[Some]]:
    """Batches of consecutive documents: `most` documents, or as many as together reach `characters`."""
    batch: list[Some] = []
    held = 0
    for document in documents:
        batch.append(document)
        held += len(document.text)
        if len(batch) == most or held >= characters:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def whole(file: BinaryIO, source: SourceSpec) -> bytes | Rejection:
    """The content of a file, or a rejection when it is longer than the bound of its source."""
    content = file.read(source.max_document_bytes + 1)
    return content if len(content) <= source.max_document_bytes else Rejection(TOO_LARGE)


def bounded(document: SourceDocument | Rejection, source: SourceSpec) -> SourceDocument | Rejection:
    """The document, or a rejection when its text is longer than the bound of its source."""
    most = source.max_document_bytes
    if (
        isinstance(document, Rejection)
        or 4 * len(document.text) <= most
        or len(document.text.encode()) <= most
    ):
        return document
    return Rejection(TOO_LARGE)


def fix_of(rejected: Mapping[str, int], otherwise: str) -> str:
    """What to do about a source without a document, from the numbers of its rejections by reason."""
    if [reason for reason, number in rejected.items() if number] == [TOO_LARGE]:
        return "raise max_document_bytes of the source, or name other files"
    return otherwise


class Damaged(Exception):
    """A damaged or truncated file; the message says where."""


UNREADABLE = (
    OSError,
    EOFError,
    zlib.error,
    lzma.LZMAError,
    pyarrow.ArrowException,
    UnicodeDecodeError,
    MemoryError,
    Damaged,
)
"""The errors of parsers for damaged bytes, including those in column names and sizes."""


class NotAsStated(Exception):
    """A readable file that contradicts the spec. `place`: the place in the file, such as `line 3`; `fix`:
    what to do, such as `correct text_column`."""

    def __init__(self, problem: str, fix: str, place: str = "") -> None:
        super().__init__(problem, fix, place)
        self.problem, self.fix, self.place = problem, fix, place


def encodable(text: str) -> str | Rejection:
    """The text, or a rejection if an escape in it spells half a surrogate pair, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return Rejection("not_utf8")
    return text
