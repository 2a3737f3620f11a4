"""How the passes of a corpus are cut into units: spans of tasks, ranges of hashes, shards and cells.

Two plans are made, and committed as units, so that every worker and every later attempt continues as the
first one began: `CorpusPlan` when the filter tasks are done, `Layout` when it is known which documents stay.

Invariants:
- Neither the plan nor the memory it was made for changes the result.
- A unit fills `run_bytes` of memory, an eighth of the `memory` of the spec, with rows that it sorts; a few
  copies of these are held at a time. Where one unit's rows of one cell would be less than `range_bytes`
  (2 MiB; reads from the store are not smaller), a span has more tasks, and spills to local disk what it
  writes.
"""

from __future__ import annotations

from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from apertus_model.data.verdicts import MEMBER_BYTES

SIDE_BYTES = 200  # of a document beside its tokens, about
REJECT_BYTES = 400
KEPT_ROWS = 2**24  # of a file
REJECT_ROWS = 2**22
MOST_GROUPS = 64  # files of a unit for one output
RANGE_BYTES = 2 * 2**20


class Size(NamedTuple):
    """What a filter task has left."""

    bytes: int
    documents: int  # with what the reader rejected
    tokenised: int


class Output(BaseModel):
    """Files of one kind that the last pass writes, each in so many cells."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    files: int
    cells: int  # of each file

    @property
    def all_cells(self) -> int:
        return self.files * self.cells

    @property
    def files_per_group(self) -> int:
        return -(-self.files // MOST_GROUPS)

    @property
    def borders(self) -> list[int]:
        """First cell of each group of files, and the end."""
        step = self.files_per_group * self.cells
        return [*range(0, self.all_cells, step), self.all_cells] if self.files else [0]


class CorpusPlan(BaseModel):
    """The passes that find duplicates."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    memory: int  # bytes
    bytes: int  # that the filter tasks left, with their records in memory
    spans: list[list[str]]  # tasks of each, by the keys of their units
    documents: int  # that were read, with what the reader rejected
    tokenised: int
    ranges: int  # of hashes of texts
    read: dict[str, int]  # documents, bytes, characters
    rejected: dict[str, int]  # by reason

    @classmethod
    def make(
        cls, tasks: dict[str, Size], memory: int, read: dict[str, int], rejected: dict[str, int]
    ) -> CorpusPlan:
        """For the tasks of a source, in order."""
        documents = sum(size.documents for size in tasks.values())
        tokenised = sum(size.tokenised for size in tasks.values())
        weights = {key: size.bytes + MEMBER_BYTES * size.documents for key, size in tasks.items()}
        run, total = run_bytes(memory), sum(weights.values())
        least = max(run, _parts(total, run) * range_bytes(memory))
        spans: list[list[str]] = [[]]
        held = 0
        for key, weight in weights.items():
            if held >= least:
                spans.append([])
                held = 0
            spans[-1].append(key)
            held += weight
        return cls(
            memory=memory,
            bytes=total,
            spans=spans,
            documents=documents,
            tokenised=tokenised,
            ranges=_parts(MEMBER_BYTES * documents, run),
            read=read,
            rejected=rejected,
        )

    @property
    def small(self) -> bool:
        """Whether one unit could hold all, so that the process of the stage runs the passes that follow."""
        return self.bytes <= run_bytes(self.memory)

    def signature_ranges(self, buckets: int) -> int:
        """Ranges of values of signatures."""
        return _parts(24 * buckets * self.documents, run_bytes(self.memory))

    def fits(self, edges: int) -> bool:
        """Whether one unit can hold so many edges, as stored, as numbers, and while it joins them."""
        return 144 * edges <= self.memory


class Probe(BaseModel):
    """A document that memorisation probes are made of."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    text: int  # hash
    bucket: int  # copies in the training split


class Duplicate(BaseModel):
    """A duplicate that is shown, by the hashes of both texts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    step: int
    text: int
    kept: int  # or the number of another part, below MOST_PARTS


class Layout(BaseModel):
    """The passes that shuffle and write."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    outputs: dict[str, Output]  # train, validation, kept, rejects
    probes: list[Probe] = []
    shown: list[Duplicate] = []


def run_bytes(memory: int) -> int:
    return max(1, memory // 8)


def range_bytes(memory: int) -> int:
    return min(RANGE_BYTES, max(1, run_bytes(memory) // 8))


def shards(documents: int, tokens: int, shard_tokens: int, itemsize: int, memory: int) -> Output:
    """The shards of a split; none without documents."""
    return _output(
        documents, _parts(tokens, shard_tokens), itemsize * tokens + SIDE_BYTES * documents, memory
    )


def table(rows: int, rows_per_file: int, row_bytes: int, memory: int) -> Output:
    """The files of a table; none without rows."""
    return _output(rows, _parts(rows, rows_per_file), row_bytes * rows, memory)


def _output(rows: int, files: int, size: int, memory: int) -> Output:
    if not rows:
        return Output(files=0, cells=1)
    return Output(files=files, cells=_parts(size // files, run_bytes(memory)))


def _parts(size: int, most: int) -> int:
    return max(1, -(-size // most))
