"""Rehearsed ranks in the report: charts of memory and time of a step, a table of memory beside the plan, and
tables about the rank with the largest peak.

Invariant: only units are computed here; every number comes from a rehearsal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from apertus_model.rehearsal.records import HIDDEN, KINDS, PartResult, Rehearsed
from flows.format import BYTES, Unit, flop, unit_of
from flows.report.figures import NEUTRAL, SERIES_COLOURS, Entry, Figure, Style, axis_title, label, plot
from specs.cluster import GPUS

HEIGHT = 320
LONGEST = 12  # operators in a table
ROW = 34  # pixels of a bar
SECONDS: Sequence[Unit] = (1.0, "seconds"), (1e-3, "milliseconds"), (1e-6, "microseconds")
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


def rehearsals(parts: Sequence[PartResult]) -> dict[str, list[Figure]]:
    """Two charts for each part that was rehearsed, by its name."""
    return {part.part: [_memory_chart(part), _time_chart(part)] for part in parts if part.built}


def _memory_chart(part: PartResult) -> Figure:
    rank, rehearsed = part.busiest
    used = [
        index
        for index, kind in enumerate(KINDS)
        if any(moment.kinds[index] for moment in rehearsed.memory.moments)
    ]
    styles = {index: Style(colour) for index, colour in zip(used, SERIES_COLOURS, strict=False)}
    second, time = unit_of(rehearsed.memory.moments[-1].seconds, SECONDS)
    byte, unit = unit_of(rehearsed.memory.total, BYTES)
    times = [moment.seconds / second for moment in rehearsed.memory.moments]
    traces = [
        go.Scatter(
            x=times,
            y=[moment.kinds[index] / byte for moment in rehearsed.memory.moments],
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
    most = GPUS[part.gpu].memory
    limit = f"the {most / 1e9:.0f} GB of the {part.gpu}"
    if visible := rehearsed.memory.total >= VISIBLE * most:
        line = {"dash": "dash", "width": 1.5, "color": NEUTRAL}
        ends = {"x": [times[0], times[-1]], "y": [most / byte] * 2}
        traces.append(go.Scatter(**ends, mode="lines", hoverinfo="skip", line=line))
    share = f"dashed: {limit}" if visible else f"{100 * rehearsed.memory.total / most:.2g}% of {limit}"
    return Figure(
        title=f"Memory of a step: {part.part}, rank {rank} of {part.gpus:,}",
        summary=f"Peak {rehearsed.memory.total / byte:.1f} {unit}; {share}.",
        height=HEIGHT,
        plot=plot(
            traces,
            xaxis={"title": axis_title(f"{time} of computation")},
            yaxis={"ticksuffix": f" {unit}", "rangemode": "tozero"},
        ),
        legend=[Entry(_name(KINDS[index]), KINDS[index], style) for index, style in styles.items()],
        wide=True,
        text="The fullest moments of the step. communication: gathered weights, and what is sent.",
    )


def _time_chart(part: PartResult) -> Figure:
    """The predicted time of a step, with a bar for each rank."""
    times = {f"rank {rank}": _classes(rehearsed, part.bubble) for rank, rehearsed in part.built.items()}
    second, unit = unit_of(max(sum(classes.values()) for classes in times.values()), SECONDS)
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
        title=f"Predicted time of a step: {part.part}",
        summary=f"{speed:,.0f} tokens per second and GPU."
        if speed is not None
        else "A rank could not be built.",
        height=90 + ROW * len(times),
        plot=plot(
            bars,
            barmode="stack",
            xaxis={"title": axis_title(unit)},
            yaxis={"type": "category", "autorange": "reversed", "automargin": True},
        ),
        legend=[Entry(_name(kind), kind, style) for kind, style in styles.items()],
        wide=True,
    )


def _classes(rehearsed: Rehearsed, bubble: float) -> dict[str, float]:
    """Seconds by class of operators, by mesh of the collectives that are waited for, and idle time."""
    waits: defaultdict[str, float] = defaultdict(float)
    for line in rehearsed.collectives:
        if line.mesh not in HIDDEN:
            waits[line.mesh] += line.seconds
    beyond = rehearsed.waited_seconds - sum(waits.values())
    times = rehearsed.classes | dict(waits) | {"fsdp": beyond, "bubble": bubble * rehearsed.seconds}
    return {kind: seconds for kind, seconds in times.items() if seconds > 1e-3 * rehearsed.seconds}


def _name(kind: str) -> str:
    return NAMES.get(kind, kind)


# Tables


@dataclass(frozen=True)
class RehearsalTable:
    """Rows of a table; numbers begin with the column `numbers`, counted from 0."""

    title: str
    headings: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    numbers: int = 1


def by_stage(parts: Sequence[PartResult]) -> dict[str, list[PartResult]]:
    """The parts by stage, in the order of the recipe."""
    stages = defaultdict[str, list[PartResult]](list)
    for part in parts:
        stages[part.stage].append(part)
    return dict(stages)


def tables(part: PartResult) -> list[RehearsalTable]:
    """The tables of a part; an empty list if no rank builds."""
    if not part.built:
        return []
    rank, rehearsed = part.busiest
    return [
        _memory(part),
        _tensors(rank, rehearsed),
        _collectives(rank, rehearsed),
        _waits(rank, rehearsed),
        _operators(rank, rehearsed),
    ]


def _gb(size: float) -> str:
    return f"{size / 1e9:,.3g}"


def _memory(part: PartResult) -> RehearsalTable:
    rows = []
    for rank in part.ranks:
        if (rehearsed := rank.report.rehearsed) is not None:
            kinds, planned = rehearsed.memory.kinds, rank.planned_memory["total"]
            sizes = (*(_gb(kinds[kind]) for kind in KINDS), _gb(rehearsed.memory.total), _gb(planned))
            rows.append((f"{rank.rank:,}", *sizes, f"{planned / rehearsed.memory.total - 1:+.1%}"))
    headings = ("rank", *map(_name, KINDS), "total", "plan", "difference")
    return RehearsalTable("GB at the peak of a step", headings, rows, 0)


def _tensors(rank: int, rehearsed: Rehearsed) -> RehearsalTable:
    rows = [
        (line.operator, " × ".join(map(str, line.shape)), line.dtype, _name(line.kind),
         f"{line.number:,}", _gb(line.bytes))
        for line in rehearsed.memory.largest
    ]  # fmt: skip
    headings = ("made by", "shape", "dtype", "kind", "tensors", "GB")
    return RehearsalTable(f"Largest tensors at the peak of rank {rank:,}", headings, rows, 4)


def _collectives(rank: int, rehearsed: Rehearsed) -> RehearsalTable:
    rows = [
        (line.kind, line.mesh, f"{line.ranks:,}", f"{line.calls:,}", f"{line.asynchronous:,}",
         _gb(line.bytes), f"{line.seconds:.3g}", f"{line.hidden_seconds:.3g}")
        for line in rehearsed.collectives
    ]  # fmt: skip
    headings = ("collective", "mesh", "GPUs", "calls", "asynchronous", "GB", "seconds", "hidden")
    return RehearsalTable(f"Collectives of a step of rank {rank:,}", headings, rows, 2)


def _waits(rank: int, rehearsed: Rehearsed) -> RehearsalTable:
    rows = [(line.place, line.what, f"{line.calls:,}") for line in rehearsed.synchronisations]
    return RehearsalTable(
        f"Waits for the GPU in a step of rank {rank:,}", ("place", "what", "calls"), rows, 2
    )


def _operators(rank: int, rehearsed: Rehearsed) -> RehearsalTable:
    rows = [
        (line.operator, _name(line.kind), f"{line.calls:,}", flop(line.flops), _gb(line.bytes),
         f"{line.seconds:.3g}", f"{line.seconds / rehearsed.compute_seconds:.1%}")
        for line in rehearsed.operators[:LONGEST]
    ]  # fmt: skip
    headings = ("operator", "class", "calls", "FLOPs", "GB", "seconds", "of all")
    title = f"Operators of rank {rank:,}, which leave {rehearsed.bound:.0%} of the peak to products"
    return RehearsalTable(title, headings, rows, 2)
