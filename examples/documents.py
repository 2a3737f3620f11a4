"""Readers of documents in Python files and in catalogues of translations.

Invariant: Python files are parsed (`ast`), never imported or executed.
"""

from __future__ import annotations

import ast
import json
import random
import string
import warnings
from collections.abc import Iterator
from typing import Any, BinaryIO

from apertus_model.data.documents.parsed import Parsed, Rejection, SourceDocument, encodable, whole
from specs.sources import SourceSpec

CATALOGUE_DOCUMENT_BYTES = 4096
LITERAL_CHARACTERS = 200
CONTEXT_END = "\x04"  # between the context of a message and the message


def docstrings(file: BinaryIO, source: SourceSpec, path: str) -> Parsed:
    """Each docstring of a Python file."""
    tree = syntax_tree(file, source)
    if isinstance(tree, Rejection):
        yield tree
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text and text.strip():
                yield encodable(text)


def shuffled_docstrings(file: BinaryIO, source: SourceSpec, path: str) -> Parsed:
    """Each docstring of a Python file, with its characters in a random order that the text decides."""
    for text in docstrings(file, source, path):
        if isinstance(text, str):
            characters = list(text)
            random.Random(text).shuffle(characters)
            yield "".join(characters)
        else:
            yield text


def repeated_letters(file: BinaryIO, source: SourceSpec, path: str) -> Parsed:
    """A document for each docstring of a Python file: 12 letters that the text decides, seven times. After
    the first time, they can be known by looking back."""
    for text in docstrings(file, source, path):
        if isinstance(text, str):
            letters = random.Random(text).choices(string.ascii_lowercase, k=12)
            yield " ".join(7 * letters)
        else:
            yield text


def literals(file: BinaryIO, source: SourceSpec, path: str) -> Parsed:
    """The long strings of a Python file, except those that are statements of their own: docstrings are not
    literals."""
    tree = syntax_tree(file, source)
    if isinstance(tree, Rejection):
        yield tree
        return
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) else None
        if (
            isinstance(text, str)
            and id(node) not in alone
            and len(text) >= LITERAL_CHARACTERS
            and text.strip()
        ):
            yield encodable(text)


def syntax_tree(file: BinaryIO, source: SourceSpec) -> ast.Module | Rejection:
    """The syntax tree of a Python file, which is parsed and not run."""
    content = whole(file, source)
    if isinstance(content, Rejection):
        return content
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about somebody else's strings
        try:
            return ast.parse(content)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return Rejection("not_python")


def gettext_json(file: BinaryIO, source: SourceSpec, path: str) -> Parsed:
    """Translated messages of a Jed catalogue, `{"": header, message: [translation, plural, ...]}`, joined
    by line breaks into documents of about CATALOGUE_DOCUMENT_BYTES."""
    catalogue = _catalogue(file, source)
    if isinstance(catalogue, Rejection):
        yield catalogue
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


def gettext_messages(file: BinaryIO, source: SourceSpec, path: str) -> Parsed:
    """Each translated message of a Jed catalogue, with the message as its id and the catalogue's language in
    `language`: catalogues of one program are parallel text."""
    catalogue = _catalogue(file, source)
    if isinstance(catalogue, Rejection):
        yield catalogue
        return
    if not isinstance(language := catalogue[""].get("language"), str):
        yield Rejection("no_language")
        return
    for message, translation in _translated(catalogue):
        yield SourceDocument(translation, message, {"language": language})


def gettext_originals(file: BinaryIO, source: SourceSpec, path: str) -> Parsed:
    """The messages of `gettext_messages`, but untranslated: in English, without the context that may precede
    them."""
    catalogue = _catalogue(file, source)
    if isinstance(catalogue, Rejection):
        yield catalogue
        return
    for message, _ in _translated(catalogue):
        yield SourceDocument(message.rpartition(CONTEXT_END)[2], message, {"language": "en"})


def _translated(catalogue: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The messages with the first form of their translations."""
    for message, translations in catalogue.items():
        text = translations[0] if message and isinstance(translations, list) and translations else None
        if isinstance(text, str) and text.strip() and not isinstance(encodable(text + message), Rejection):
            yield message, text


def _catalogue(file: BinaryIO, source: SourceSpec) -> dict[str, Any] | Rejection:
    """A Jed catalogue, whose header is under ""."""
    content = whole(file, source)
    if isinstance(content, Rejection):
        return content
    try:
        catalogue = json.loads(content)
    except (ValueError, RecursionError):
        return Rejection("not_json")
    if not isinstance(catalogue, dict) or not isinstance(catalogue.get(""), dict):
        return Rejection("no_catalogue")
    return catalogue
