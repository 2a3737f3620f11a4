"""How the documents of a source are found in its files.

Invariants:
- A parser sees bytes and yields documents in an order that the bytes decide. Python files are parsed (`ast`), never imported or executed.
- What is left out is counted under a name (`Rejection`); what means that the source is not what the spec says (no such column, a file
  that cannot be read) is a SourceError that names the file.

Nothing here needs datatrove: the tokenizer stage reads the same documents without it.
"""

from __future__ import annotations

import ast
import json
import lzma
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import BinaryIO, NamedTuple

import fsspec
from fsspec import AbstractFileSystem
from zstandard import ZstdError

from infra.store.inputs import SourceError
from specs.sources import SourceSpec, resolve_url

CATALOGUE_DOCUMENT_BYTES = 4096


class Rejection(NamedTuple):
    """Something that should have been a document and is not; `reason` is the name it is counted under."""

    reason: str


Parsed = Iterator[str | Rejection]


def open_source(source: SourceSpec) -> tuple[AbstractFileSystem, str]:
    """The file system of a source and the path of its folder on it."""
    fs, root = fsspec.core.url_to_fs(resolve_url(source.url))
    return fs, root.rstrip("/")


def read_documents(source: SourceSpec, fs: AbstractFileSystem, root: str, path: str) -> Parsed:
    """Documents and rejections of one file; `path` is relative to `root`, "" when the source is a single file.

    Raises SourceError when the file cannot be read or does not have the column that the spec names.
    """
    full = f"{root}/{path}" if path else root
    try:
        with fs.open(full, "rb", compression="infer") as file:
            yield from _PARSERS[source.format](file, source)
    except _MissingColumn as error:
        found = f"no column '{source.text_column}'; there are {error.columns}"
        raise SourceError(f"'{full}', line {error.line}: {found}. Fix: text_column") from error
    except (OSError, EOFError, zlib.error, lzma.LZMAError, ZstdError) as error:
        raise SourceError(f"cannot read '{full}': {type(error).__name__}: {error}") from error


class _MissingColumn(Exception):
    def __init__(self, line: int, columns: str) -> None:
        super().__init__(line, columns)
        self.line = line
        self.columns = columns


def _whole_file(file: BinaryIO, source: SourceSpec) -> Parsed:
    try:
        text = file.read().decode("utf-8")
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
                yield _encodable(text)


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
            yield _encodable(text)


def syntax_tree(file: BinaryIO) -> ast.Module | Rejection:
    """A Python file, parsed and not run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is wrong inside somebody else's strings
        try:
            return ast.parse(file.read())
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return Rejection("not_python")


def _encodable(text: str) -> str | Rejection:
    """Escapes in a literal can spell half a surrogate pair, which no encoding stores."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return Rejection("not_utf8")
    return text


def _json_lines(file: BinaryIO, source: SourceSpec) -> Parsed:
    """datatrove's JsonlReader leaves a file at the first byte that is not UTF-8 and only logs broken lines; here each one is counted."""
    for number, line in enumerate(read_lines(file), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except UnicodeDecodeError:
            yield Rejection("not_utf8")
            continue
        except (ValueError, RecursionError):
            yield Rejection("not_json")
            continue
        if not isinstance(row, dict):
            yield Rejection("not_json")
        elif source.text_column not in row:
            raise _MissingColumn(number, ", ".join(sorted(row)) or "none")
        elif not isinstance(row[source.text_column], str) or not row[source.text_column].strip():
            yield Rejection("empty")
        else:
            yield _encodable(row[source.text_column])


def read_lines(file: BinaryIO) -> Iterator[bytes]:
    """Lines without their ends. Not every decompressor can be iterated over; each can be read."""
    rest = b""
    while chunk := file.read(2**20):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines
    if rest:
        yield rest


def _gettext_catalogue(file: BinaryIO, source: SourceSpec) -> Parsed:
    """Translated messages of a Jed catalogue, `{"": header, message: [translation, plural, ...]}`, joined by line breaks into documents of
    about CATALOGUE_DOCUMENT_BYTES."""
    try:
        catalogue = json.loads(file.read())
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
            if isinstance(text, str) and text.strip() and not isinstance(_encodable(text), Rejection):
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
    "jsonl": _json_lines,
    "gettext-json": _gettext_catalogue,
}
