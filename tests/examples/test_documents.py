"""The readers of `examples`: docstrings and long strings of Python files, catalogues of translations."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from apertus_model.data.documents.parsed import Rejection
from apertus_model.data.documents.readers import open_source, read_documents
from examples.documents import LITERAL_CHARACTERS
from specs.sources import SourceSpec


def _read(path: Path, content: bytes | str, reader: str, **fields: Any) -> list[str | Rejection]:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    source = SourceSpec(
        url=str(path.parent),
        format="documents",
        reader=f"examples.documents:{reader}",
        version=1,
        **fields,
    )
    documents = read_documents(source, *open_source(source), path.name)
    return [one if isinstance(one, Rejection) else one.text for one in documents]


LONG = "x" * LITERAL_CHARACTERS
PYTHON = f'''
"""Module."""
raise SystemExit("this file is read, not run")
class A:
    """Class,

        indented."""
    def f(self):
        """Method."""
    async def g(self):
        "Coroutine."
        return """not a docstring, but long: {LONG}"""
TOPICS = {{"if": "{LONG}", "else": "{LONG[1:]}"}}
"{LONG} stands alone"
'''


def test_docstrings_are_read_without_running_the_file(tmp_path: Path) -> None:
    assert sorted(map(str, _read(tmp_path / "a.py", PYTHON, "docstrings"))) == [
        "Class,\n\nindented.",
        "Coroutine.",
        "Method.",
        "Module.",
    ]


def test_repeated_letters_follow_from_a_docstring_and_from_nothing_else(tmp_path: Path) -> None:
    found = [str(one).split() for one in _read(tmp_path / "a.py", PYTHON, "repeated_letters")]
    assert found == [str(one).split() for one in _read(tmp_path / "b.py", PYTHON, "repeated_letters")]
    assert len({tuple(letters) for letters in found}) == len(found) == 4
    for letters in found:
        assert letters == 7 * letters[:12] and all(len(one) == 1 and one.islower() for one in letters)


def test_long_literals_are_documents_and_docstrings_are_not(tmp_path: Path) -> None:
    assert sorted(map(str, _read(tmp_path / "a.py", PYTHON, "literals"))) == [
        f"not a docstring, but long: {LONG}",
        LONG,
    ]


def test_half_a_surrogate_pair_is_counted(tmp_path: Path) -> None:
    content = f"x = '{LONG}\\ud83d' * 1\n"
    assert _read(tmp_path / "a.py", content, "literals") == [Rejection("not_utf8")]


@pytest.mark.parametrize("content", [b"def f(:\n", b"x = 1\x00", b"# coding: no-such-coding\n", b"(" * 5000])
def test_files_that_python_cannot_parse_are_counted(tmp_path: Path, content: bytes) -> None:
    assert _read(tmp_path / "a.py", content, "docstrings") == [Rejection("not_python")]


@pytest.mark.parametrize("reader", ["docstrings", "literals", "gettext_json", "gettext_messages"])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_file_longer_than_the_limit_is_counted(tmp_path: Path, reader: str, suffix: str) -> None:
    for size, rejections in ((20, []), (21, [Rejection("too_large")])):
        content = b"#" * size
        written = gzip.compress(content) if suffix else content
        documents = _read(tmp_path / f"a{suffix}", written, reader, max_document_bytes=20)
        assert [one for one in documents if one == Rejection("too_large")] == rejections


def test_catalogues_give_translations_joined_into_documents(tmp_path: Path) -> None:
    catalogue: dict[str, Any] = {
        "": {"language": "de"},
        "Open": ["Öffnen"],
        "menu\u0004%d file": ["%d Datei", "%d Dateien"],
        "Untranslated": [""],
    }
    catalogue |= {f"message {n}": [f"Nachricht {n} " + "x" * 100] for n in range(60)}
    documents = _read(tmp_path / "a.json", json.dumps(catalogue), "gettext_json")
    assert str(documents[0]).splitlines()[:3] == ["Öffnen", "%d Datei", "%d Dateien"]
    assert [4000 < len(str(document)) < 4400 for document in documents] == [True, False]
    assert len("\n".join(map(str, documents)).splitlines()) == 63
    assert _read(tmp_path / "b.json", '{"name": "package"}', "gettext_json") == [Rejection("no_catalogue")]
    assert _read(tmp_path / "c.json", "{", "gettext_json") == [Rejection("not_json")]


def test_catalogues_give_parallel_messages_with_their_language(tmp_path: Path) -> None:
    catalogue = {
        "": {"language": "de-DE"},
        "Open": ["Öffnen"],
        "menu\u0004%d file": ["%d Datei", "%d Dateien"],
        "Untranslated": [""],
        "Plural only": ["", "alle"],
        "Broken": "no list",
    }
    (tmp_path / "a.json").write_text(json.dumps(catalogue))

    def rows(reader: str) -> list[Any]:
        source = SourceSpec(
            url=str(tmp_path), format="documents", reader=f"examples.documents:{reader}", version=1
        )
        return [tuple(one) for one in read_documents(source, *open_source(source), "a.json")]

    language = {"language": "de-DE"}
    assert rows("gettext_messages") == [
        ("Öffnen", "Open", language),
        ("%d Datei", "menu\x04%d file", language),
    ]
    assert rows("gettext_originals") == [
        ("Open", "Open", {"language": "en"}),
        ("%d file", "menu\x04%d file", {"language": "en"}),
    ]
    assert _read(tmp_path / "b.json", '{"": {}, "Open": ["x"]}', "gettext_messages") == [
        Rejection("no_language")
    ]
