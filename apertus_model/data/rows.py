"""Rows of JSON for people to read, in numbered files, and the restartable units of work that make them.

Invariants:
- Row i of an artifact is in file i // ROWS_PER_FILE, whatever units computed it; row i of completions or
  rewards belongs to row i of the prompts.
- A unit is a range of items; a committed range is not computed again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

from apertus_model.progress import Progress
from infra.store import Artifact, Attempt, StoreError

ROWS_PER_FILE = 1024

Row = dict[str, Any]
Span = tuple[int, int]


class Rows(Sequence[Row]):
    """The rows of an artifact written by `write_rows`, read in order or by range; one file at a time is
    held in memory."""

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
        row: Row = json.loads(self._open[1][line])
        return row


def same_rows(first: Rows, *others: Rows) -> int:
    """Number of rows of artifacts that belong together. StoreError when they differ, which a planner does
    not let happen."""
    for other in others:
        if len(other) != len(first):
            raise StoreError(
                f"{other.artifact.path} has {len(other)} rows, {first.artifact.path} has {len(first)}"
            )
    return len(first)


def write_rows(attempt: Attempt, name: str, rows: Iterable[Row]) -> dict[str, Any]:
    """Puts `<name>-00000.jsonl`, ... into the artifact. Returns the facts that `Rows` reads: `{"shards":
    [...], "rows": n}`."""
    shards: list[str] = []
    lines: list[str] = []
    count = 0

    def put() -> None:
        shards.append(f"{name}-{len(shards):05d}")
        attempt.write_bytes(f"{shards[-1]}.jsonl", "".join(lines).encode())
        lines.clear()

    for row in rows:
        lines.append(to_line(row))
        count += 1
        if len(lines) == ROWS_PER_FILE:
            put()
    if lines:
        put()
    return {"shards": shards, "rows": count}


def to_line(row: Row) -> str:
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"


def spans(total: int, size: int) -> list[Span]:
    """[start, stop) of consecutive ranges of at most `size` items."""
    return [(start, min(start + size, total)) for start in range(0, total, size)]


def unit_key(name: str, span: Span) -> str:
    """Key of the unit of a range, so that units of other sizes have other keys."""
    return f"{name}-{span[0]:08d}-{span[1]:08d}"


class Units:
    """Ranges of items, each a unit of the store named `<name>-<start>-<stop>` that holds the rows computed
    for it."""

    def __init__(self, attempt: Attempt, name: str, ranges: Sequence[Span]) -> None:
        self._attempt = attempt
        self._keys = {span: unit_key(name, span) for span in ranges}

    def compute(
        self, rows_of: Callable[[int, int], Iterable[Row]], progress: Progress, *, items: str = "prompts"
    ) -> None:
        """Calls `rows_of(start, stop)`, which yields a row per item, for every range that was not
        committed yet."""
        total = sum(stop - start for start, stop in self._keys)
        done = 0
        for (start, stop), key in self._keys.items():
            if self._attempt.unit(key) is None:
                path, number = self._attempt.workdir / f"{key}.jsonl", 0
                with open(path, "w", encoding="utf-8") as file:
                    for number, row in enumerate(rows_of(start, stop), start=1):
                        file.write(to_line(row))
                        progress.update(done + number, total, items)
                    assert number == stop - start, f"{number} rows for {stop - start} {items}"
                self._attempt.commit_unit(key, files={"rows.jsonl": path})
                path.unlink()
            done += stop - start
            progress.update(done, total, items)

    def rows(self) -> Iterator[Row]:
        """All rows, in the order of the ranges."""
        for path in self.files():
            with open(path, "rb") as file:
                for line in file:
                    yield json.loads(line)

    def files(self) -> Iterator[Path]:
        """A local file of each range, content checked. StoreError for one that is damaged or gone."""
        for key in self._keys.values():
            yield self._attempt.unit_files(key, self._attempt.committed_unit(key))["rows.jsonl"]
