"""Reads documents of a source for classifiers, in windows of bounded memory. A conversation is a document.

Invariant: documents come in the order of the files, without the rejected ones, as the `corpus` or the
`conversations` stage reads them.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from fsspec import AbstractFileSystem

from apertus_model.chat.messages import ConversationError
from apertus_model.data.conversations.readers import read_conversations
from apertus_model.data.conversations.text import TEXTS, messages_of
from apertus_model.data.corpora.duplicates import text_hash
from apertus_model.data.documents.parsed import batches
from apertus_model.data.documents.readers import Rejection, open_source, read_documents
from apertus_model.work import CommittedUnit
from infra.store import Attempt
from infra.store.inputs import SourceError
from specs.sources import CONVERSATIONAL, SourceSpec

WINDOW_DOCUMENTS = 4096
WINDOW_CHARACTERS = 2**24


class ReadDocument(NamedTuple):
    """A document as a classifier sees it."""

    file: str  # path in the source
    hash: int  # of the whole text
    text: str  # cut to its first characters
    columns: dict[str, Any]


def read_source(
    source: SourceSpec, files: Iterable[str], characters: int, of: str = "conversation"
) -> Iterator[ReadDocument]:
    """Yields the documents of some files of a source, cut to their first `characters`. A source with a limit
    has to be read as a whole. `of` names the text of a conversation that is read."""
    fs, root = open_source(source)
    texts = ((path, *document) for path in files for document in _texts(source, fs, root, path, of))
    for path, text, columns in islice(texts, source.limit):
        yield ReadDocument(path, text_hash(text), text[:characters], columns)


def _texts(
    source: SourceSpec, fs: AbstractFileSystem, root: str, path: str, of: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the texts of one file, and their columns."""
    if source.format not in CONVERSATIONAL:
        for document in read_documents(source, fs, root, path):
            if not isinstance(document, Rejection):
                yield document.text, document.metadata
        return
    for conversation in read_conversations(source, fs, root, path):
        with contextlib.suppress(ConversationError):
            if not isinstance(conversation, Rejection):
                yield TEXTS[of](messages_of(conversation)), conversation.metadata


def windows(documents: Iterable[ReadDocument]) -> Iterator[list[ReadDocument]]:
    """Yields lists of consecutive documents, as many as may be in memory together."""
    return batches(documents, WINDOW_DOCUMENTS, WINDOW_CHARACTERS)


def put_shards(
    attempt: Attempt, units: Sequence[CommittedUnit], name: str, source: SourceSpec, documents: int
) -> list[str]:
    """Puts the file `<name>.parquet` of each unit into the artifact, and returns their names there.
    SourceError when all together have no documents."""
    if not documents:
        raise SourceError(
            f"there is no document in {source.url}. Fix: correct the url, the globs, the format or"
            " max_document_bytes"
        )
    shards = [f"{name}-{number:05d}.parquet" for number in range(len(units))]
    for shard, unit in zip(shards, units, strict=True):
        attempt.put(unit.files[f"{name}.parquet"], shard)
    return shards
