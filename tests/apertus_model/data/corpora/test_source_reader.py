from __future__ import annotations

import json
from pathlib import Path

from datatrove.data import Document

from apertus_model.data.corpora.tokenise import read_texts
from apertus_model.data.documents.parsed import Rejection
from specs.sources import SourceSpec

ROWS = [
    {"text": "one", "id": 7, "url": "https://a.example", "score": 0.25, "metadata": "odd name", "more": 1},
    {"text": "", "id": 8, "url": None, "score": None, "metadata": None, "more": 2},
    {"text": "two", "id": None, "url": None, "score": 1, "metadata": None, "more": 3},
]


def test_filters_see_the_columns_that_the_source_names_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    source = SourceSpec(
        url=str(tmp_path), format="jsonl", id_column="id", metadata=["url", "score", "metadata"]
    )
    one, rejected, two = read_texts(source, ["a.jsonl"])
    assert isinstance(one, Document) and isinstance(two, Document)
    assert (one.id, one.text) == ("7", "one")
    assert one.metadata == {"url": "https://a.example", "score": 0.25, "metadata": "odd name"}
    assert (two.id, two.metadata) == ("a.jsonl/2", {"url": None, "score": 1, "metadata": None})
    assert rejected == Rejection("empty", "a.jsonl/1")
    assert list(read_texts(source, [])) == []
