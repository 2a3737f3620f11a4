"""Rows reach the cell that they were given, spilled or not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from apertus_model.data.corpora.exchange import CellWriter, cell_borders, cell_of, read_cells
from infra.store.reading.ranges import LocalFile

SCHEMA = pa.schema([pa.field("key", pa.uint64()), pa.field("text", pa.large_string())])


@pytest.mark.parametrize("memory", [1, 500, 10**6])
def test_a_cell_has_its_rows_whatever_the_memory(memory: int, tmp_path: Path) -> None:
    keys = np.random.default_rng(0).integers(0, 2**64, 300, np.uint64)
    writer = CellWriter(tmp_path, "rows", SCHEMA, [0, 4, 7], memory)
    for some in np.split(keys, [1, 100, 100, 250]):
        writer.add(pa.table([some, [str(key) for key in some]], schema=SCHEMA), cell_of(some, 7))
    files = writer.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(files) == ["rows-00000", "rows-00001"]
    for cell in range(7):
        name, cells, within = ("rows-00000", 4, cell) if cell < 4 else ("rows-00001", 3, cell - 4)
        found = read_cells([LocalFile(files[name])], SCHEMA, cells, within, within + 1)
        first, end = cell_borders(7, cell)
        assert found.column("key").to_pylist() == [int(key) for key in keys if first <= key < end]
        assert found.column("text").to_pylist() == [str(int(key)) for key in keys if first <= key < end]
    some = read_cells([LocalFile(files["rows-00000"])], SCHEMA, 4, 1, 3).column("key").to_pylist()
    first, end = cell_borders(7, 1)[0], cell_borders(7, 2)[1]
    assert sorted(some) == sorted(int(key) for key in keys if first <= key < end)


def test_cells_of_finer_division_lie_within_those_of_the_coarser() -> None:
    keys = np.random.default_rng(1).integers(0, 2**64, 1000, np.uint64)
    assert (cell_of(keys, 12) // 4 == cell_of(keys, 3)).all()
    assert cell_of(np.array([0, 2**64 - 1], np.uint64), 5).tolist() == [0, 4]
