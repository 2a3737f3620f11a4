"""Readers of the documents in the files of a source.

Invariants:
- A parser sees bytes and yields documents in an order that the bytes decide. A reader of an installed package
  is imported only when a file is read.
- Rejected documents are counted under a name (`Rejection`); a column that no row has, or a file that cannot
  be read to its end, is a SourceError that names the place.
- A reader of an installed package, for a user's own format, is a function of an open binary file
  (decompressed), the source, and the path of the file below the source's url. It yields what a parser of
  `parsed.py` yields or, for a source of conversations, `Conversation` or `Rejection`. Its results depend on
  nothing else; the recipe states the reader's version, which is raised when its results change. A recipe
  names it as `reader: package.module:name`.
- Files are streamed, except for formats with one document per file, of `max_document_bytes` at most.

Only web archives need datatrove: the tokenizer stage reads the same documents without it.
"""

import importlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import PurePosixPath
from typing import Any, BinaryIO, TypeVar

import fsspec
from fsspec import AbstractFileSystem

from apertus_model.data.documents.compressed import decompressed
from apertus_model.data.documents.parsed import (
    UNREADABLE,
    FoundDocuments,
    NotAsStated,
    Parsed,
    Rejection,
    SourceDocument,
    bounded,
    whole,
)
from apertus_model.data.documents.tables import arrow, json_lines, parquet
from apertus_model.data.documents.web import warc
from apertus_model.work.units import units_of
from infra.store.inputs import SourceError, list_source
from specs.sources import COMPRESSED_INSIDE, ROWS, SourceSpec, resolve_url
from specs.stages.base import DocumentsPart

Found = TypeVar("Found")


def open_source(source: SourceSpec) -> tuple[AbstractFileSystem, str]:
    """The file system of a source and the path of its folder on it."""
    fs, root = fsspec.core.url_to_fs(resolve_url(source.url))
    return fs, root.rstrip("/")


def files_of_tasks(part: DocumentsPart, what: str) -> dict[str, list[str]]:
    """The files of each task, by the key of its unit. A source with a limit is one task, since
    several tasks could not count its documents together."""
    listing = part.listing or [file.path for file in list_source(part.source).files]
    size = len(listing) if part.source.limit else part.files_per_task
    return {key: listing[slice(*span)] for key, span in units_of(what, len(listing), size).items()}


def read_documents(source: SourceSpec, fs: AbstractFileSystem, root: str, path: str) -> FoundDocuments:
    """The documents and rejections of one file; `path` is relative to `root`, "" when the source is a single
    file. A file without rows or records is one rejection, `empty_file`. SourceError when the file cannot be
    read to its end, or no row has the columns that the spec names."""
    name = path or PurePosixPath(root).name

    def parse(content: BinaryIO, source: SourceSpec) -> Parsed:
        if source.reader is None:
            return _PARSERS[source.format](content, source)
        return read_installed(source, content, name)

    nothing = True
    for document in read_file(source, fs, root, path, parse):
        yield bounded(SourceDocument(document, None, {}) if isinstance(document, str) else document, source)
        nothing = False
    if nothing and source.format in ROWS:
        yield Rejection("empty_file")


def check_holdout(share: float, usual: float, held_out: int, total: int, of: str, least: int | None) -> None:
    """SourceError when nothing is left to train on, or a stated share holds out none of `total` documents or
    conversations. A share of 0 may hold out none, and so may the default share, `usual`, of few. `of`: what
    the share is of, with its number: `60 documents`; `least`: the smallest hash, of 64 bits, by which a share
    would hold something out; None if no share can."""
    if held_out < total and (held_out or share in (0, usual)):
        return
    fix = f"set holdout: 0, which holds out none, or add {of.rpartition(' ')[2].removesuffix('s')}s"
    if not held_out and least is not None:
        fix += f", or set a share of {(least + 1) / 2**64:.4f} or more"
    raise SourceError(f"holdout {share} of {of} holds out {'all' if held_out else 'none'}. Fix: {fix}")


def source_documents(
    source: SourceSpec, files: Iterable[str] | None = None
) -> Iterator[tuple[str, int, SourceDocument | Rejection]]:
    """The documents and rejections in files of a source, by default in all, each with the path of its file
    and its number there. SourceError as `read_documents`."""
    fs, root = open_source(source)
    if files is None:
        files = (file.path for file in list_source(source).files)
    for path in files:
        for number, document in enumerate(read_documents(source, fs, root, path)):
            yield path or PurePosixPath(root).name, number, document


def texts_of(source: SourceSpec) -> Iterator[str]:
    """The texts of all documents of a source, in the order of its files. SourceError as `read_documents`."""
    documents = (document for _, _, document in source_documents(source))
    return (document.text for document in documents if not isinstance(document, Rejection))


def read_file(
    source: SourceSpec,
    fs: AbstractFileSystem,
    root: str,
    path: str,
    parse: Callable[[BinaryIO, SourceSpec], Iterator[Found]],
) -> Iterator[Found]:
    """The results of a parser for one file, which is decompressed according to its name. SourceError when the
    file cannot be read to its end, or contradicts the spec."""
    full = f"{root}/{path}" if path else root
    count, position = 0, ""
    try:
        with fs.open(full, "rb") as raw:
            try:
                content = raw if source.format in COMPRESSED_INSIDE else decompressed(raw, full)
                for result in parse(content, source):
                    yield result
                    count += 1
            except UNREADABLE:
                position = "" if raw.closed else f", at about byte {raw.tell()}"
                position = f" after document {count}{position}"
                raise
    except NotAsStated as error:
        place = f", {error.place}" if error.place else ""
        raise SourceError(f"'{full}'{place}: {error.problem}. Fix: {error.fix}") from error
    except UNREADABLE as error:
        raise SourceError(f"cannot read '{full}'{position}: {type(error).__name__}: {error}") from error


def _whole_file(file: BinaryIO, source: SourceSpec) -> Parsed:
    content = whole(file, source)
    if isinstance(content, Rejection):
        yield content
        return
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        yield Rejection("not_utf8")
        return
    yield text if text.strip() else Rejection("empty")


TABLE_PARSERS: dict[str, Callable[[BinaryIO, SourceSpec], FoundDocuments]] = {
    "jsonl": json_lines,
    "parquet": parquet,
    "arrow": arrow,
}
_PARSERS: dict[str, Callable[[BinaryIO, SourceSpec], Parsed]] = {
    "text": _whole_file,
    "code": _whole_file,
    "warc": warc,
    **TABLE_PARSERS,
}


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
