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
SECONDS = ("seconds", 1.0), ("milliseconds", 1e-3), ("microseconds", 1e-6)
BYTES = ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)
VISIBLE = 0.05  # of a GPU's memory; below this, a chart with the limit would show nothing else
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
    """The memory over a step of the rank with the largest peak."""
    rank, found = part.busiest
    used = [
        index
        for index, kind in enumerate(KINDS)
        if any(moment.kinds[index] for moment in found.memory.moments)
    ]
    styles = {index: Style(colour) for index, colour in zip(used, SERIES_COLOURS, strict=False)}
    time, second = _unit(SECONDS, found.memory.moments[-1].seconds)
    unit, byte = _unit(BYTES, found.memory.total)
    times = [moment.seconds / second for moment in found.memory.moments]
    traces = [
        go.Scatter(
            x=times,
            y=[moment.kinds[index] / byte for moment in found.memory.moments],
            name=label(_name(KINDS[index])),
            legendgroup=KINDS[index],
            stackgroup="bytes",
            mode="lines",
            line={"width": 0, "color": style.colour},
            fillcolor=style.colour,
            hovertemplate=f"%{{y:.2f}} {unit} %{{fullData.name}}<extra></extra>",
        )
        for index, style in styles.items()
    ]
    limit = f"the {part.limit / 1e9:.0f} GB of the {part.gpu}"
    if visible := found.memory.total >= VISIBLE * part.limit:
        line = {"dash": "dash", "width": 1.5, "color": NEUTRAL}
        ends = {"x": [times[0], times[-1]], "y": [part.limit / byte] * 2}
        traces.append(go.Scatter(**ends, mode="lines", hoverinfo="skip", line=line))
    share = f"dashed: {limit}" if visible else f"{100 * found.memory.total / part.limit:.2g}% of {limit}"
    return Figure(
        title=f"Memory of a step: {part.name}, rank {rank} of {part.gpus:,}",
        summary=f"Peak {found.memory.total / byte:.1f} {unit}; {share}.",
        height=HEIGHT,
        plot=plot(
            traces,
            xaxis={"title": {"text": f"{time} of computation", "font": {"size": 12}}},
            yaxis={"ticksuffix": f" {unit}", "rangemode": "tozero"},
        ),
        legend=[Entry(_name(KINDS[index]), KINDS[index], style) for index, style in styles.items()],
        wide=True,
        text="The fullest moments of the step. communication: gathered weights, and what is sent.",
    )


def _time(part: RehearsedPart) -> Figure:
    """The predicted time of a step, with a bar for each rank."""
    times = {f"rank {rank}": _classes(found, part.bubble) for rank, found in part.ranks.items()}
    unit, second = _unit(SECONDS, max(sum(classes.values()) for classes in times.values()))
    kinds = list(dict.fromkeys(kind for classes in times.values() for kind in classes))
    styles = {kind: Style(SERIES_COLOURS[index % len(SERIES_COLOURS)]) for index, kind in enumerate(kinds)}
    bars = [
        go.Bar(
            y=list(times),
            x=[classes.get(kind, 0.0) / second for classes in times.values()],
            orientation="h",
            name=label(_name(kind)),
            legendgroup=kind,
            marker={"color": styles[kind].colour},
            hovertemplate=f"%{{x:.3g}} {unit} %{{fullData.name}}<extra></extra>",
        )
        for kind in kinds
    ]
    speed = part.tokens_per_second_per_gpu
    return Figure(
        title=f"Predicted time of a step: {part.name}",
        summary=f"{speed:,.0f} tokens per second and GPU."
        if speed is not None
        else "A rank could not be built.",
        height=90 + ROW * len(times),
        plot=plot(
            bars,
            barmode="stack",
            xaxis={"title": {"text": unit, "font": {"size": 12}}},
            yaxis={"type": "category", "autorange": "reversed", "automargin": True},
        ),
        legend=[Entry(_name(kind), kind, style) for kind, style in styles.items()],
        wide=True,
    )


def _classes(found: Rehearsed, bubble: float) -> dict[str, float]:
    """Seconds by class of operators, by mesh of the collectives that are waited for, and idle time."""
    waits: defaultdict[str, float] = defaultdict(float)
    for line in found.collectives:
        if line.mesh not in HIDDEN:
            waits[line.mesh] += line.seconds
    beyond = found.waited_seconds - sum(waits.values())
    times = found.classes | dict(waits) | {"fsdp": beyond, "bubble": bubble * found.seconds}
    return {kind: seconds for kind, seconds in times.items() if seconds > 1e-3 * found.seconds}


def _unit(units: Sequence[tuple[str, float]], largest: float) -> tuple[str, float]:
    """The largest unit that is no more than the largest value, or the smallest one."""
    return next((unit for unit in units if unit[1] <= largest), units[-1])


def _name(kind: str) -> str:
    return NAMES.get(kind, kind)
