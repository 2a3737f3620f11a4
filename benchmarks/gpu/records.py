"""What is written of a comparison: the record in JSON, and the page."""

from __future__ import annotations

import statistics

from pydantic import ConfigDict, Field

from apertus_model.rehearsal.classes import CLASSES
from benchmarks.gpu.shapes import BESIDE, LIMIT
from benchmarks.measure import spread
from specs.base import Strict
from tools.record import table

HEADINGS = (
    "contender", "parameters", "tokens/s", "of peak", "of the limit", "beside peers", "GB", "first loss"
)  # fmt: skip


class Round(Strict):
    """Some steps of a contender. Contenders of a group took the rounds of equal number in turns."""

    group: int
    number: int
    tokens: int
    seconds: float
    clock: str = ""  # of the GPU, and its power, during the round

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


class Row(Strict):
    """A contender with a shape; filled in while it is measured."""

    model_config = ConfigDict(frozen=False)

    shape: str
    contender: str
    parameters: int
    rounds: list[Round] = Field(default_factory=list)
    share_of_peak: float | None = None  # at the median speed
    first_loss: float | None = None
    peak_memory: int | None = None  # bytes that tensors had
    profile: dict[str, float] = Field(default_factory=dict)  # seconds a step, by class
    predicted: dict[str, float] = Field(default_factory=dict)  # by a rehearsal
    why: str = ""  # it was not measured, or failed

    @property
    def speeds(self) -> list[float]:
        return [part.speed for part in self.rounds]

    @property
    def median(self) -> float:
        return statistics.median(self.speeds)

    def beside(self, other: Row) -> list[float]:
        """Ratios of the speeds, by round where both took turns, else of the medians."""
        theirs = {(part.group, part.number): part.speed for part in other.rounds}
        turns = [part for part in self.rounds if (part.group, part.number) in theirs]
        if turns or not self.rounds or not theirs:
            return [part.speed / theirs[part.group, part.number] for part in turns]
        return [self.median / other.median]


class Record(Strict):
    """One run of the command; filled in while it runs."""

    model_config = ConfigDict(frozen=False)

    made: str  # date and commit
    machine: dict[str, str]
    sheet: str | None  # the name of the GPU's data sheet; None without a GPU, or if none is known
    seconds: float
    rows: list[Row]


def page(record: Record) -> str:
    """The page in Markdown: a table of speeds for each shape, and one of each profile."""
    lines = [
        "# Speed on one GPU",
        "",
        f"{record.made}, {record.seconds / 60:.1f} minutes. Written by `python -m benchmarks.gpu`.",
        "",
        "; ".join(f"{name}: {value}" for name, value in record.machine.items()) + ".",
        "",
        "Tokens per second are the median of rounds in turns, with the smallest and the largest. The limit is"
        " the time of the same matrix products and attention, forward and backward, alone. Contenders of a"
        " model have the same batch, AdamW, float32 weights and moments, and recompute nothing. torchtitan's"
        " Llama has SwiGLU and no norm of queries and keys: as many operations, 0.1% other parameters. With a"
        " torch before 2.13, autocast casts its weights, not FSDP.",
    ]
    for shape in dict.fromkeys(row.shape for row in record.rows):
        rows = {row.contender: row for row in record.rows if row.shape == shape}
        lines += ["", f"## {shape}", "", *table(HEADINGS, (_cells(row, rows) for row in rows.values()))]
        lines += _profiles([row for row in rows.values() if row.profile])
    return "\n".join(lines) + "\n"


def _cells(row: Row, others: dict[str, Row]) -> list[str]:
    speed = spread(row.speeds) if row.rounds else ""
    peers = [others[name] for name in BESIDE.get(row.contender, ())]
    ratios = {peer.contender: row.beside(peer) for peer in peers}
    of_limit = row.beside(others[LIMIT])
    return [
        row.contender,
        f"{row.parameters / 1e6:,.1f}M",
        "; ".join(filter(None, (speed, row.why))),
        "" if row.share_of_peak is None else f"{row.share_of_peak:.1%}",
        spread(of_limit) if of_limit else "",
        "; ".join(f"{spread(ratio)} x {name}" for name, ratio in ratios.items() if ratio),
        "" if row.peak_memory is None else f"{row.peak_memory / 1e9:.1f}",
        "" if row.first_loss is None else f"{row.first_loss:.4f}",
    ]


def _profiles(rows: list[Row]) -> list[str]:
    """Milliseconds a step by class; predicted ones after a slash."""

    def cell(row: Row, kind: str) -> str:
        expected = f" / {1e3 * row.predicted[kind]:.1f}" if row.predicted else ""
        return f"{1e3 * row.profile[kind]:.1f}{expected}"

    if not rows:
        return []
    cells = [[kind, *(cell(row, kind) for row in rows)] for kind in CLASSES]
    heading = "Milliseconds a step, under the profiler; of a rehearsal after the slash."
    return ["", heading, "", *table(["class", *(row.contender for row in rows)], cells)]
