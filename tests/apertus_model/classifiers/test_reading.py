"""Documents are read in order, cut, and in windows of bounded size."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from apertus_model.classifiers import reading
from apertus_model.classifiers.reading import ReadDocument, read_source, windows
from specs.sources import SourceSpec


def test_documents_are_cut_and_hashed_whole(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "alpha"}\nno json\n{"text": " "}\n{"text": "beta"}\n')
    (tmp_path / "b.jsonl").write_text('{"text": "gamma"}\n')
    source = SourceSpec(url=str(tmp_path), format="jsonl")
    found = list(read_source(source, ["a.jsonl", "b.jsonl"], 3))
    assert [(one.file, one.text) for one in found] == [
        ("a.jsonl", "alp"),
        ("a.jsonl", "bet"),
        ("b.jsonl", "gam"),
    ]
    assert found[0].hash == int.from_bytes(hashlib.blake2b(b"alpha", digest_size=8).digest(), "little")
    limited = source.model_copy(update={"limit": 2})
    assert [one.text for one in read_source(limited, ["a.jsonl", "b.jsonl"], 9)] == ["alpha", "beta"]


def test_windows_are_bounded_by_documents_and_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "WINDOW_DOCUMENTS", 3)
    monkeypatch.setattr(reading, "WINDOW_CHARACTERS", 10)
    documents = [ReadDocument("f", i, "x" * size, {}) for i, size in enumerate([1, 1, 1, 9, 4, 2])]
    assert [[one.hash for one in window] for window in windows(documents)] == [[0, 1, 2], [3, 4], [5]]
