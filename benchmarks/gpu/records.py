"""What is written of a comparison: the record in JSON, and the page."""

from __future__ import annotations

import statistics

from pydantic import ConfigDict, Field

from benchmarks.gpu.profile import CLASSES
from benchmarks.gpu.shapes import LIMIT, Task
from benchmarks.measure import spread
from specs.base import Strict


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
    tokens_per_step: int
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
        ratios = [
            part.speed / theirs[part.group, part.number]
            for part in self.rounds
            if (part.group, part.number) in theirs
        ]
        if ratios or not (self.rounds and theirs):
            return ratios
        return [self.median / other.median]


class Record(Strict):
    """One run of the command."""

    date: str
    commit: str
    machine: dict[str, str]
    seconds: float
    rows: list[Row]


def page(record: Record, tasks: list[Task]) -> str:
    """The page in Markdown: a table of speeds for each shape, and one of each profile."""
    compared = {(task.shape.name, task.contender.name): task.contender.beside for task in tasks}
    rows = {(row.shape, row.contender): row for row in record.rows}
    lines = [
        "# Speed on one GPU",
        "",
        f"{record.date}, commit {record.commit}, {record.seconds / 60:.1f} minutes."
        " Written by `python -m benchmarks.gpu`.",
        "",
        "; ".join(f"{name}: {value}" for name, value in record.machine.items()) + ".",
        "",
        "Tokens per second are the median of rounds in turns, with the smallest and the largest. The limit is"
        " the time of the same matrix products and attention, forward and backward, alone. Contenders of a"
        " model have the same batch, AdamW, float32 weights and moments, and recompute nothing. torchtitan's"
        " Llama has SwiGLU and no norm of queries and keys: as many operations, 0.1% other parameters.",
    ]
    for shape in dict.fromkeys(row.shape for row in record.rows):
        lines += [
            "",
            f"## {shape}",
            "",
            "| contender | parameters | tokens/s | of peak | of the limit | beside peers | GB | first loss |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for (of, name), row in rows.items():
            if of == shape:
                peers = [rows[shape, peer] for peer in compared.get((shape, name), ())]
                lines.append(_line(row, rows[shape, LIMIT], peers))
        lines += _profiles([row for row in record.rows if row.shape == shape and row.profile])
    return "\n".join(lines) + "\n"


def _line(row: Row, limit: Row, peers: list[Row]) -> str:
    size = f"| {row.contender} | {row.parameters / 1e6:,.1f}M |"
    if row.why and not row.rounds:
        return f"{size} {row.why.replace('|', '/')} | | | | | |"
    ratios = [f"{spread(row.beside(peer))} x {peer.contender}" for peer in peers if row.beside(peer)]
    cells = [
        spread(row.speeds) + (f"; {row.why}" if row.why else ""),
        "-" if row.share_of_peak is None else f"{row.share_of_peak:.1%}",
        spread(row.beside(limit)) if limit.rounds else "-",
        "; ".join(ratios) or "-",
        "-" if row.peak_memory is None else f"{row.peak_memory / 1e9:.1f}",
        "-" if row.first_loss is None else f"{row.first_loss:.4f}",
    ]
    return f"{size} {' | '.join(cells)} |"


def _profiles(rows: list[Row]) -> list[str]:
    """Milliseconds a step by class; predicted ones after a slash."""
    if not rows:
        return []
    table = [
        "",
        "Milliseconds a step, under the profiler; of a rehearsal after the slash.",
        "",
        f"| class | {' | '.join(row.contender for row in rows)} |",
        "|---" * (len(rows) + 1) + "|",
    ]
    for kind in CLASSES:
        cells = []
        for row in rows:
            expected = f" / {1e3 * row.predicted[kind]:.1f}" if row.predicted else ""
            cells.append(f"{1e3 * row.profile[kind]:.1f}{expected}")
        table.append(f"| {kind} | {' | '.join(cells)} |")
    return table
