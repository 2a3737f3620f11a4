"""Sources that a function of an installed package reads."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from apertus_model.data.conversations.readers import read_conversations
from apertus_model.data.conversations.stored import Conversation
from apertus_model.data.documents.parsed import NotAsStated, Rejection, SourceDocument
from apertus_model.data.documents.readers import open_source, read_documents
from infra.store.inputs import SourceError
from specs.sources import SourceSpec

HERE = __name__


def lines(file: BinaryIO, source: SourceSpec, path: str) -> Iterator[Any]:
    """A document of each line."""
    for number, line in enumerate(file):
        text = line.decode().strip()
        yield SourceDocument(text, f"{path}#{number}", {}) if text else Rejection("empty")


def whole(file: BinaryIO, source: SourceSpec, path: str) -> Iterator[Any]:
    yield file.read().decode()


def answers(file: BinaryIO, source: SourceSpec, path: str) -> Iterator[Any]:
    """A conversation of each line."""
    for line in file:
        question, answer = line.decode().strip().split("=")
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        yield Conversation(question, turns, None, [answer], path, {})


def mistaken(file: BinaryIO, source: SourceSpec, path: str) -> Iterator[Any]:
    yield "one"
    raise KeyError("two")


def disappointed(file: BinaryIO, source: SourceSpec, path: str) -> Iterator[Any]:
    raise NotAsStated("it has no heading", "correct the url", "line 1")
    yield


def source_of(folder: Path, reader: str, format_: Any = "documents") -> SourceSpec:
    return SourceSpec(
        url=str(folder), format=format_, reader=reader if ":" in reader else f"{HERE}:{reader}", version=1
    )


def read(path: Path, reader: str, format_: str = "documents") -> list[Any]:
    source = source_of(path.parent, reader, format_)
    parse = read_documents if format_ == "documents" else read_conversations
    return list(parse(source, *open_source(source), path.name))


@pytest.mark.parametrize("name", ["a.own", "a.own.gz"])
def test_documents_are_what_the_reader_yields_of_the_decompressed_file(tmp_path: Path, name: str) -> None:
    content = b"one\n\ntwo\n"
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    found = [
        SourceDocument("one", f"{name}#0", {}),
        Rejection("empty"),
        SourceDocument("two", f"{name}#2", {}),
    ]
    assert read(tmp_path / name, "lines") == found
    assert read(tmp_path / name, "whole") == [SourceDocument("one\n\ntwo\n", None, {})]


def test_conversations_are_what_the_reader_yields(tmp_path: Path) -> None:
    (tmp_path / "a.own").write_text("Why?=So.\n")
    [found] = read(tmp_path / "a.own", "answers", "conversations")
    assert (found.id, found.completions, found.group) == ("Why?", ["So."], "a.own")


@pytest.mark.parametrize("format_", ["documents", "conversations"])
@pytest.mark.parametrize(
    ("reader", "message"),
    [
        (
            "no_such_package.module:name",
            "the reader no_such_package.module:name cannot be imported: No module named .*Fix: install its",
        ),
        (
            "json:no_such_name",
            (
                "the reader json:no_such_name cannot be imported: .*no_such_name.*Fix: install its package,"
                " or correct"
            ),
        ),
        ("mistaken", r"the reader .*:mistaken failed at 'a\.own' of .*: KeyError: 'two'"),
    ],
)
def test_a_reader_that_is_missing_or_fails_is_named(
    tmp_path: Path, format_: str, reader: str, message: str
) -> None:
    (tmp_path / "a.own").write_text("text")
    with pytest.raises(SourceError, match=message):
        read(tmp_path / "a.own", reader, format_)


def test_unreadable_file_of_a_reader_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"text" * 100, mtime=0)[:20])
    with pytest.raises(SourceError, match=r"cannot read '.*a\.gz' after document 0"):
        read(tmp_path / "a.gz", "whole")
    (tmp_path / "a.own").write_text("text")
    with pytest.raises(SourceError, match=r"a\.own', line 1: it has no heading\. Fix: correct the url"):
        read(tmp_path / "a.own", "disappointed")
