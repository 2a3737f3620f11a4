"""Charts of rehearsed ranks: memory over a step by kind, and the time of a step by class.

Invariant: every number comes from a rehearsal; nothing is predicted here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from apertus_model.rehearsal.records import HIDDEN, KINDS, Rehearsed
from flows.report.figures import NEUTRAL, SERIES_COLOURS, Entry, Figure, Style, label, plot

HEIGHT = 320
ROW = 34  # pixels of a bar
NAMES = {
    "optimizer_states": "optimizer states",
    "matrix": "matrix products",
    "memory": "memory-bound operators",
    "tp": "tensor parallelism",
    "cp": "context parallelism",
    "pp": "sends of the pipeline",
    "fsdp": "FSDP, beyond computation",
    "bubble": "idle in the pipeline",
}


@dataclass(frozen=True)
class RehearsedPart:
    """A part of a stage, with the ranks that were rehearsed."""

    stage: str
    name: str
    gpus: int
    gpu: str
    limit: float  # bytes that a GPU has
    bubble: float  # as a fraction of the time of the busiest rank
    tokens_per_second_per_gpu: float | None
    ranks: dict[int, Rehearsed]
    planned: dict[int, float]  # bytes at the peak, by the formulas
    failures: list[str]  # of ranks that do not build

    @property
    def busiest(self) -> tuple[int, Rehearsed]:
        """The rank with the largest peak."""
        return max(self.ranks.items(), key=lambda item: item[1].memory.total)


def rehearsals(parts: Sequence[RehearsedPart]) -> dict[str, list[Figure]]:
    """Two charts for each part that was rehearsed, by its name."""
    return {part.name: [_memory(part), _time(part)] for part in parts if part.ranks}


def _memory(part: RehearsedPart) -> Figure:
    """Of the rank with the largest peak."""
    rank, found = part.busiest
    used = [
        index
        for index, kind in enumerate(KINDS)
        if any(moment.kinds[index] for moment in found.memory.moments)
    ]
    styles = {index: Style(colour) for index, colour in zip(used, SERIES_COLOURS, strict=False)}
    times = [moment.seconds for moment in found.memory.moments]
    traces = [
        go.Scatter(
            x=times,
            y=[moment.kinds[index] / 1e9 for moment in found.memory.moments],
            name=label(_name(KINDS[index])),
            legendgroup=KINDS[index],
            stackgroup="bytes",
            mode="lines",
            line={"width": 0, "color": style.colour},
            fillcolor=style.colour,
            hovertemplate="%{y:.2f} GB %{fullData.name}<extra></extra>",
        )
        for index, style in styles.items()
    ]
    traces.append(
        go.Scatter(
            x=[times[0], times[-1]], y=[part.limit / 1e9] * 2, mode="lines", hoverinfo="skip",
            line={"dash": "dash", "width": 1.5, "color": NEUTRAL},
        )
    )  # fmt: skip
    peak = found.memory.total / 1e9
    return Figure(
        title=f"Memory of a step: {part.name}, rank {rank} of {part.gpus:,}",
        summary=f"Peak {peak:.1f} GB; dashed: the {part.limit / 1e9:.0f} GB of the {part.gpu}.",
        height=HEIGHT,
        plot=plot(
            traces,
            xaxis={"title": {"text": "seconds of computation", "font": {"size": 12}}},
            yaxis={"ticksuffix": " GB", "rangemode": "tozero"},
        ),
        legend=[Entry(_name(KINDS[index]), KINDS[index], style) for index, style in styles.items()],
        wide=True,
        text="The fullest moments of the step. communication: gathered weights, and what is sent.",
    )


def _time(part: RehearsedPart) -> Figure:
    """A bar for each rank."""
    times = {f"rank {rank}": _classes(found, part.bubble) for rank, found in part.ranks.items()}
    kinds = list(dict.fromkeys(kind for classes in times.values() for kind in classes))
    styles = {kind: Style(SERIES_COLOURS[index % len(SERIES_COLOURS)]) for index, kind in enumerate(kinds)}
    bars = [
        go.Bar(
            y=list(times),
            x=[classes.get(kind, 0.0) for classes in times.values()],
            orientation="h",
            name=label(_name(kind)),
            legendgroup=kind,
            marker={"color": styles[kind].colour},
            hovertemplate="%{x:.3g} s %{fullData.name}<extra></extra>",
        )
        for kind in kinds
    ]
    speed = part.tokens_per_second_per_gpu
    return Figure(
        title=f"Predicted time of a step: {part.name}",
        summary=f"{speed:,.0f} tokens per second and GPU." if speed is not None else "A rank does not build.",
        height=90 + ROW * len(times),
        plot=plot(
            bars,
            barmode="stack",
            xaxis={"title": {"text": "seconds", "font": {"size": 12}}},
            yaxis={"type": "category", "autorange": "reversed", "automargin": True},
        ),
        legend=[Entry(_name(kind), kind, style) for kind, style in styles.items()],
        wide=True,
    )


def _classes(found: Rehearsed, bubble: float) -> dict[str, float]:
    """Seconds by class of operators, by mesh of the collectives that are waited for, and idle ones."""
    waits: defaultdict[str, float] = defaultdict(float)
    for line in found.collectives:
        if line.mesh not in HIDDEN:
            waits[line.mesh] += line.seconds
    beyond = found.waited_seconds - sum(waits.values())
    times = found.classes | dict(waits) | {"fsdp": beyond, "bubble": bubble * found.seconds}
    return {kind: seconds for kind, seconds in times.items() if seconds > 1e-3 * found.seconds}


def _name(kind: str) -> str:
    return NAMES.get(kind, kind)
