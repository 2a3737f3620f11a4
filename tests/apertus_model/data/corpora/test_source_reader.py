from __future__ import annotations

import json
from pathlib import Path

from apertus_model.data.corpora.tokenise import SourceReader
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
    reader = SourceReader(source, [[], ["a.jsonl"]])
    one, two = reader.run(rank=1)
    assert (one.id, one.text) == ("7", "one")
    assert one.metadata == {"url": "https://a.example", "score": 0.25, "metadata": "odd name"}
    assert (two.id, two.metadata) == ("a.jsonl/2", {"url": None, "score": 1, "metadata": None})
    assert reader.stats.stats["rejected_empty"].total == 1
    assert list(reader.run(rank=0)) == []
