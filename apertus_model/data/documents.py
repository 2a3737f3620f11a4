"""How the documents of a source are found in its files.

Invariants:
- A parser sees bytes and yields documents in an order that the bytes decide. Python files are parsed (`ast`), never imported or executed.
- What is left out is counted under a name (`Rejection`); what means that the source is not what the spec says (no such column, a file
  that cannot be read, or ends too early) is a SourceError that names the file and how far it was read.
- Files are streamed (`tables`, `web`), but for the formats in which a file is one document, of DOCUMENT_BYTES at most.

Nothing here but web archives needs datatrove: the tokenizer stage reads the same documents without it.
"""

from __future__ import annotations

import ast
import json
import lzma
import warnings
import zlib
from collections.abc import Callable
from typing import BinaryIO

import fsspec
import pyarrow
from fsspec import AbstractFileSystem

from apertus_model.data.compressed import decompressed
from apertus_model.data.found import Damaged, FoundDocuments, NotAsStated, Parsed, Rejection, SourceDocument, encodable, whole
from apertus_model.data.tables import arrow, json_lines, parquet
from apertus_model.data.web import warc
from infra.store.inputs import SourceError
from specs.sources import COMPRESSED_INSIDE, ROWS, SourceSpec, resolve_url

CATALOGUE_DOCUMENT_BYTES = 4096
UNREADABLE = (OSError, EOFError, zlib.error, lzma.LZMAError, pyarrow.ArrowException, UnicodeDecodeError, MemoryError, Damaged)
"""What readers raise for bytes that are not what they should be; also in names of columns, and as sizes beyond reason."""


def open_source(source: SourceSpec) -> tuple[AbstractFileSystem, str]:
    """The file system of a source and the path of its folder on it."""
    fs, root = fsspec.core.url_to_fs(resolve_url(source.url))
    return fs, root.rstrip("/")


def read_documents(source: SourceSpec, fs: AbstractFileSystem, root: str, path: str) -> FoundDocuments:
    """Documents and rejections of one file; `path` is relative to `root`, "" when the source is a single file.

    A file of rows or records that has none is one rejection, `empty_file`. Raises SourceError when the file cannot be read to its end, or
    does not have the columns that the spec names.
    """
    full = f"{root}/{path}" if path else root
    count, position = 0, ""
    try:
        with fs.open(full, "rb") as raw:
            try:
                for found in _PARSERS[source.format](raw if source.format in COMPRESSED_INSIDE else decompressed(raw, full), source):
                    yield SourceDocument(found, None, {}) if isinstance(found, str) else found
                    count += 1
            except UNREADABLE:
                position = f" behind document {count}" + ("" if raw.closed else f", at about byte {raw.tell()}")
                raise
        if not count and source.format in ROWS:
            yield Rejection("empty_file")
    except NotAsStated as error:
        place = f", {error.place}" if error.place else ""
        raise SourceError(f"'{full}'{place}: {error.found}. Fix: {error.fix}") from error
    except UNREADABLE as error:
        raise SourceError(f"cannot read '{full}'{position}: {type(error).__name__}: {error}") from error


def _whole_file(file: BinaryIO, source: SourceSpec) -> Parsed:
    content = whole(file)
    if isinstance(content, Rejection):
        yield content
        return
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        yield Rejection("not_utf8")
        return
    yield text if text.strip() else Rejection("empty")


def _docstrings(file: BinaryIO, source: SourceSpec) -> Parsed:
    tree = syntax_tree(file)
    if isinstance(tree, Rejection):
        yield tree
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text and text.strip():
                yield encodable(text)


def _literals(file: BinaryIO, source: SourceSpec) -> Parsed:
    """Long strings but those that stand alone as a statement: docstrings are documents of another format."""
    tree = syntax_tree(file)
    if isinstance(tree, Rejection):
        yield tree
        return
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and id(node) not in alone and len(text) >= source.min_literal and text.strip():
            yield encodable(text)


def syntax_tree(file: BinaryIO) -> ast.Module | Rejection:
    """A Python file, parsed and not run."""
    content = whole(file)
    if isinstance(content, Rejection):
        return content
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is wrong inside somebody else's strings
        try:
            return ast.parse(content)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return Rejection("not_python")


def _gettext_catalogue(file: BinaryIO, source: SourceSpec) -> Parsed:
    """Translated messages of a Jed catalogue, `{"": header, message: [translation, plural, ...]}`, joined by line breaks into documents of
    about CATALOGUE_DOCUMENT_BYTES."""
    content = whole(file)
    if isinstance(content, Rejection):
        yield content
        return
    try:
        catalogue = json.loads(content)
    except (ValueError, RecursionError):
        yield Rejection("not_json")
        return
    if not isinstance(catalogue, dict) or not isinstance(catalogue.get(""), dict):
        yield Rejection("no_catalogue")
        return
    lines: list[str] = []
    size = 0
    for message, translations in catalogue.items():
        if not message or not isinstance(translations, list):
            continue
        for text in translations:
            if isinstance(text, str) and text.strip() and not isinstance(encodable(text), Rejection):
                lines.append(text.strip())
                size += len(text.encode())
        if size >= CATALOGUE_DOCUMENT_BYTES:
            yield "\n".join(lines)
            lines, size = [], 0
    if lines:
        yield "\n".join(lines)


_PARSERS: dict[str, Callable[[BinaryIO, SourceSpec], Parsed]] = {
    "text": _whole_file,
    "code": _whole_file,
    "docstrings": _docstrings,
    "literals": _literals,
    "jsonl": json_lines,
    "parquet": parquet,
    "arrow": arrow,
    "warc": warc,
    "gettext-json": _gettext_catalogue,
}
