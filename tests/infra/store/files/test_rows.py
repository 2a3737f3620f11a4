"""Rows of metrics as Parquet."""

from __future__ import annotations

import io
import math

import pyarrow.parquet as pq

from infra.store.files.rows import decode, encode

ROWS = [
    {"step": 1, "loss": 2.5, "lr": 1e-4},
    {"step": 1, "validation": {"web": 2.25, "code": 1.5}},
    {
        "step": 2,
        "loss": math.inf,
        "checkpoint": {"bytes": 10, "stall_seconds": 0.5},
        "anomaly": {"policy": "skip"},
    },
    {"step": 3, "validation": {"web": 2.0}},
]


def test_rows_come_back_as_they_were_given() -> None:
    assert decode(encode(ROWS), "first/history/00000003.parquet") == ROWS


def test_any_tool_for_tables_reads_them() -> None:
    table = pq.read_table(io.BytesIO(encode(ROWS)))
    assert table.column("step").to_pylist() == [1, 1, 2, 3]
    assert table.column("loss").to_pylist() == [2.5, None, math.inf, None]


def test_equal_rows_have_equal_bytes() -> None:
    assert encode(ROWS) == encode([dict(row) for row in ROWS])
