from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import fsspec
import pytest
import zstandard

from apertus_model.data.conversations.readers import read_conversations
from apertus_model.data.documents import tables
from apertus_model.data.documents.parsed import Rejection, SourceDocument
from apertus_model.data.documents.readers import open_source, read_documents
from infra.store.inputs import SourceError
from specs.sources import SourceSpec


def _read(path: Path, content: bytes | str, **fields: Any) -> list[str | Rejection]:
    return [
        found if isinstance(found, Rejection) else found.text for found in _found(path, content, **fields)
    ]


def _found(path: Path, content: bytes | str, **fields: Any) -> list[SourceDocument | Rejection]:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    source = SourceSpec(url=str(path.parent), **fields)
    return list(read_documents(source, *open_source(source), path.name))


@pytest.mark.parametrize("kind", ["text", "code"])
def test_a_file_is_a_document_to_the_last_byte(tmp_path: Path, kind: str) -> None:
    text = "def f():\r\n\treturn '\ufeffż'  \n\n"
    assert _read(tmp_path / "a", text, format=kind) == [text]


@pytest.mark.parametrize("kind", ["text", "code", "jsonl"])
def test_a_byte_order_mark_is_no_part_of_a_document(tmp_path: Path, kind: str) -> None:
    content = '{"text": "one"}' if kind == "jsonl" else "one"
    assert _read(tmp_path / "a", f"\ufeff{content}", format=kind) == ["one"]
    (nothing,) = _read(tmp_path / "b", "\ufeff", format=kind)
    assert isinstance(nothing, Rejection)


def test_files_that_are_not_text_are_counted(tmp_path: Path) -> None:
    assert _read(tmp_path / "a", b"\xff\xfe\x00", format="text") == [Rejection("not_utf8")]
    assert _read(tmp_path / "b", b" \n", format="text") == [Rejection("empty")]


def test_half_a_surrogate_pair_is_counted(tmp_path: Path) -> None:
    assert _read(tmp_path / "a.jsonl", '{"text": "\\ud83d"}\n', format="jsonl") == [Rejection("not_utf8")]


def test_lines_of_json_are_documents_and_broken_ones_are_counted(tmp_path: Path) -> None:
    content = (
        b'{"body": "one"}\n\n{"body": \n{"body": "\xff"}\n[1]\n{"body": null}\n{"body": " "}\n{"body": "two",'
        b' "id": 3}'
    )
    assert _read(tmp_path / "a.jsonl", content, format="jsonl", text_column="body") == [
        "one",
        Rejection("not_json"),
        Rejection("not_utf8"),
        Rejection("not_json"),
        Rejection("empty"),
        Rejection("empty"),
        "two",
    ]


@pytest.mark.parametrize(
    ("suffix", "compress"), [("gz", gzip.compress), ("zst", zstandard.ZstdCompressor().compress)]
)
def test_compressed_files_are_read_whatever_their_name(tmp_path: Path, suffix: str, compress: Any) -> None:
    for name in (f"a.jsonl.{suffix}", "a.jsonl", "a.jsonl.xz"):
        assert _read(tmp_path / name, compress(b'{"text": "one"}\n'), format="jsonl") == ["one"]


@pytest.mark.parametrize("read_bytes", [3, 7, 2**20])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_lines_longer_than_the_limit_are_counted_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, read_bytes: int
) -> None:
    monkeypatch.setattr(tables, "READ_BYTES", read_bytes)
    fits, long = b'{"text": "' + b"x" * 8 + b'"}', b'{"text": "' + b"x" * 9 + b'"}'
    content = b"\n".join([fits, long, fits, b"", long * 50, fits, long])
    expected = [
        "x" * 8,
        Rejection("too_large"),
        "x" * 8,
        Rejection("too_large"),
        "x" * 8,
        Rejection("too_large"),
    ]
    for end in (b"", b"\n"):
        written = gzip.compress(content + end) if suffix else content + end
        found = _read(tmp_path / f"a.jsonl{suffix}", written, format="jsonl", max_document_bytes=20)
        assert found == expected
    (tmp_path / "b.jsonl").write_bytes(long + b"\n")
    talks = SourceSpec(url=str(tmp_path), format="chat", max_document_bytes=20)
    assert list(read_conversations(talks, *open_source(talks), "b.jsonl")) == [Rejection("too_large")]


@pytest.mark.parametrize("kind", ["text", "code"])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_file_longer_than_the_limit_is_counted(tmp_path: Path, kind: str, suffix: str) -> None:
    for size, rejections in ((20, []), (21, [Rejection("too_large")])):
        content = b"#" * size
        found_documents = _read(
            tmp_path / f"a{suffix}",
            gzip.compress(content) if suffix else content,
            format=kind,
            max_document_bytes=20,
        )
        assert [one for one in found_documents if one == Rejection("too_large")] == rejections


def test_a_missing_column_names_file_line_and_columns(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"a\.jsonl', line 2: no column 'text'; there are body, id"):
        _read(tmp_path / "a.jsonl", 'no JSON\n{"body": "two", "id": 1}\n', format="jsonl")


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.gz", gzip.compress(b"text" * 100, mtime=0)[:20]), ("b.gz", b"no gzip"), ("c.zst", b"no zstd")],
)
def test_an_unreadable_file_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    with pytest.raises(SourceError, match=rf"cannot read '.*{name}'"):
        _read(tmp_path / name, content, format="text")
    with pytest.raises(SourceError, match=r"cannot read '.*gone'"):
        list(
            read_documents(
                SourceSpec(url=str(tmp_path), format="text"), fsspec.filesystem("file"), str(tmp_path), "gone"
            )
        )


def test_any_fsspec_url_is_read() -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/documents/a.txt", b"from memory")
    source = SourceSpec(url="memory://documents", format="text")
    assert list(read_documents(source, *open_source(source), "a.txt")) == [
        SourceDocument("from memory", None, {})
    ]
    single = SourceSpec(url="memory://documents/a.txt", format="text")
    assert list(read_documents(single, *open_source(single), "")) == [SourceDocument("from memory", None, {})]
