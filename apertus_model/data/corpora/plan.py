"""Divides the passes of a corpus into units: spans of tasks, ranges of hashes, shards and cells. The key of a
unit says what it computes:

    documents-...       a filter task: reads files, judges and tokenises their documents
    records-S-n         hashes of the documents of span n that reach step S, by ranges of hashes
    others-S-n          signatures of file n of the other corpora that step S compares with
    groups-S-n          joins texts that agree in a bucket: one range of values of signatures
    components-S        labels all texts of step S that are similar to a smaller one, in memory
    large-S-r-n, small-S-r-n    the same in rounds, over ranges of texts
    resolve-S-n         what becomes of the documents of a range of texts; S is `copies` where no step
                        removes duplicates, and copies are numbered
    openings-n, probes-n    beginnings of the documents of span n; those of a range that are unique
    scatter-n           the documents of span n on their way to the files of the corpus
    train-n, validation-n, kept-n, rejects-n    one file of the corpus

Two plans are committed as units, which every worker and later attempt follow: `CorpusPlan` when the filter
tasks are done, `CorpusLayout` when it is known which documents stay.

Invariants:
- Keys are stored, so their text never changes; `parse(str(key)) == key`.
- Neither the plan nor the memory it was made for changes the result.
- A unit fills `run_bytes` of memory, an eighth of the `memory` of the spec, with rows that it sorts; a few
  copies of these are held at a time. When one unit's rows of one cell would take less than `range_bytes` (2
  MiB; reads from the store are not smaller), a span has more tasks, and spills the rows that it writes to
  local disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pydantic import Field

from apertus_model.data.corpora.verdicts import MEMBER_BYTES
from specs.base import Strict

NUMBERED = -1  # in place of a step: no step removes duplicates, and copies are numbered
SPLITS = ("train", "validation")
FILES = (*SPLITS, "kept", "rejects")
SIDE_BYTES = 200  # of a document besides its tokens, approximately
REJECT_BYTES = 400
KEPT_ROWS = 2**24  # per file
REJECT_ROWS = 2**22
MOST_GROUPS = 64  # of files per output; a unit writes one file for each group
RANGE_BYTES = 2 * 2**20


@dataclass(frozen=True)
class Key:
    """The key of a unit."""

    kind: str
    number: int | None = None  # of its span, range or file; None if it covers a whole step
    step: int | None = None
    round: int | None = None  # of a step

    def __str__(self) -> str:
        name = self.kind if self.step is None else f"{self.kind}-{step_name(self.step)}"
        name = name if self.round is None else f"{name}-{self.round:03d}"
        return name if self.number is None else f"{name}-{self.number:05d}"


def parse(text: str) -> Key:
    """The key that a text spells, of any unit but the filter tasks."""
    kind, *fields = text.split("-")
    step = None
    if kind not in (*FILES, "openings", "probes", "scatter"):
        name = fields.pop(0)
        step = NUMBERED if name == step_name(NUMBERED) else int(name)
    numbers = list(map(int, fields))
    number = numbers.pop() if numbers else None
    return Key(kind, number, step, *numbers)


def step_name(step: int) -> str:
    return "copies" if step == NUMBERED else f"{step:02d}"


class Size(NamedTuple):
    bytes: int
    documents: int  # including rejected ones
    tokenised: int


class Output(Strict):
    """The files of one kind that the last pass writes, and the cells that each is written from."""

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
        """The first cell of each group of files, and the end."""
        step = self.files_per_group * self.cells
        return [*range(0, self.all_cells, step), self.all_cells] if self.files else [0]


class CorpusPlan(Strict):
    """The plan of the passes that find duplicates."""

    memory: int  # bytes
    bytes: int  # of the results of the filter tasks, including their records in memory
    spans: list[list[str]]  # tasks of each span, by the keys of their units
    documents: int  # that were read, including rejected ones
    tokenised: int
    ranges: int  # number of ranges of text hashes
    read: dict[str, int]  # documents, bytes, characters
    rejected: dict[str, int]  # by reason

    @classmethod
    def make(
        cls, tasks: dict[str, Size], memory: int, amounts: dict[str, int], rejected: dict[str, int]
    ) -> CorpusPlan:
        """The plan for the tasks of a source, given in order."""
        documents = sum(size.documents for size in tasks.values())
        tokenised = sum(size.tokenised for size in tasks.values())
        weights = {key: size.bytes + MEMBER_BYTES * size.documents for key, size in tasks.items()}
        run, total = run_bytes(memory), sum(weights.values())
        least = max(run, parts(total, run) * range_bytes(memory))
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
            ranges=parts(MEMBER_BYTES * documents, run),
            read=amounts,
            rejected=rejected,
        )

    @property
    def small(self) -> bool:
        """Whether one unit could hold all data, so that the process of the stage runs the later passes."""
        return self.bytes <= run_bytes(self.memory)

    def signature_ranges(self, buckets: int) -> int:
        return parts(24 * buckets * self.documents, run_bytes(self.memory))

    def fits(self, edges: int) -> bool:
        """Whether one unit can hold the edges as stored, as numbers, and while it joins them."""
        return 144 * edges <= self.memory


class Probe(Strict):
    """A document from which memorisation probes are made."""

    text: int  # hash of the text
    bucket: int  # copies in the training split


class Duplicate(Strict):
    """A duplicate that is shown as an example, by the hashes of both texts."""

    step: int
    text: int
    kept: int  # or the number of another part, below MOST_PARTS


class CorpusLayout(Strict):
    """The plan of the passes that shuffle and write."""

    outputs: dict[str, Output]  # train, validation, kept, rejects
    probes: list[Probe] = Field(default_factory=list)
    shown: list[Duplicate] = Field(default_factory=list)


def run_bytes(memory: int) -> int:
    return max(1, memory // 8)


def range_bytes(memory: int) -> int:
    return min(RANGE_BYTES, max(1, run_bytes(memory) // 8))


def output(rows: int, files: int, size: int, memory: int) -> Output:
    """The files of some rows of `size` bytes; there are none without rows."""
    if not rows:
        return Output(files=0, cells=1)
    return Output(files=files, cells=parts(size // files, run_bytes(memory)))


def parts(size: int, most: int) -> int:
    return max(1, -(-size // most))
