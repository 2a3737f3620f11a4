"""Rows of readable JSON in numbered files, and the units of work that hold a row for each item of a range.

Invariant: row i of an artifact is in file i // ROWS_PER_FILE, whatever units computed it; row i of
completions or rewards belongs to row i of the prompts.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, overload

from apertus_model.work.units import CommittedUnit, Result, Span
from infra.store import Artifact, Attempt

ROWS_PER_FILE = 1024

Row = dict[str, Any]


class Rows(Sequence[Row]):
    """The rows that `write_rows` has written to an artifact; one file at a time is held in memory."""

    def __init__(self, artifact: Artifact) -> None:
        facts = artifact.manifest.facts
        self.artifact = artifact
        self._shards: list[str] = facts["shards"]
        self._count = int(facts["rows"])
        self._open: tuple[int, list[bytes]] = (-1, [])

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        if not 0 <= index < self._count:
            raise IndexError(f"row {index} of {self._count}")
        shard, line = divmod(index, ROWS_PER_FILE)
        if self._open[0] != shard:
            self._open = shard, self.artifact.bytes(f"{self._shards[shard]}.jsonl").split(b"\n")
        return json.loads(self._open[1][line])


def same_rows(first: Rows, *others: Rows) -> int:
    """The number of rows of artifacts that belong together."""
    assert all(len(other) == len(first) for other in others), "the plan joins artifacts of the same prompts"
    return len(first)


def write_rows(attempt: Attempt, name: str, rows: Iterable[Row]) -> dict[str, Any]:
    """Puts `<name>-00000.jsonl`, ... into the artifact. Returns the facts `{"shards": [...], "rows": n}`."""
    shards: list[str] = []
    count, lines = 0, map(to_line, rows)
    while some := list(islice(lines, ROWS_PER_FILE)):
        shards.append(f"{name}-{len(shards):05d}")
        attempt.write_bytes(f"{shards[-1]}.jsonl", "".join(some).encode())
        count += len(some)
    return {"shards": shards, "rows": count}


def to_line(row: Row) -> str:
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"


def write_unit(span: Span, rows: Iterable[Row], path: Path) -> Result:
    """Writes the rows of a range, one for each of its items, and returns the result of the unit."""
    with open(path, "w", encoding="utf-8") as file:
        number = sum(bool(file.write(to_line(row))) for row in rows)
    assert number == span[1] - span[0], f"{number} rows for {span[1] - span[0]} items"
    return Result({"rows.jsonl": path})


def read_units(units: Iterable[CommittedUnit]) -> Iterator[Row]:
    """All rows, in the order of the units. StoreError for a file that is damaged or gone."""
    for unit in units:
        with open(unit.files["rows.jsonl"], "rb") as file:
            for line in file:
                yield json.loads(line)
