"""The table of rejects is plain Parquet, whatever the number of rows."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from apertus_model.data.corpora import records
from apertus_model.data.corpora.records import REJECTS, Removed, read_rejects, rejects_writer


@pytest.mark.parametrize("count", [0, 1, 3, 7])
def test_rows_come_back_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(records, "ROWS", 3)
    rows = [
        Removed(
            *(2**64 - 1 - number, f"web/{number}", f"https://{number}" if number % 2 else None),
            *("length", f"{number} characters"),
        )
        for number in range(count)
    ]
    with rejects_writer(tmp_path / "rejects.parquet") as writer:
        for row in rows:
            writer.add(row)
    found = read_rejects(tmp_path / "rejects.parquet")
    assert [tuple(row[name] for name in REJECTS.names) for row in found.to_pylist()] == rows
    assert pq.read_schema(tmp_path / "rejects.parquet").equals(REJECTS)
