"""Charts of rehearsed ranks: the memory and the time of a step.

Invariant: only units are computed here; every number comes from a rehearsal.
"""

from collections import defaultdict
from collections.abc import Sequence

import plotly.graph_objects as go

from apertus_model.rehearsal.records import HIDDEN, KINDS, PartResult, Rehearsed
from flows.format import BYTES, Unit, unit_of
from flows.report.figures import NEUTRAL, SERIES_COLOURS, Entry, Figure, Style, axis_title, label, plot
from specs.cluster import GPUS

HEIGHT = 320
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
    """Seconds by kind of operators, by mesh of the collectives that are waited for, and idle time."""
    waits: defaultdict[str, float] = defaultdict(float)
    for line in rehearsed.collectives:
        if line.mesh not in HIDDEN:
            waits[line.mesh] += line.seconds
    beyond = rehearsed.waited_seconds - sum(waits.values())
    times = rehearsed.kinds | dict(waits) | {"fsdp": beyond, "bubble": bubble * rehearsed.seconds}
    return {kind: seconds for kind, seconds in times.items() if seconds > 1e-3 * rehearsed.seconds}


def _name(kind: str) -> str:
    return NAMES.get(kind, kind)


def by_stage(parts: Sequence[PartResult]) -> dict[str, list[PartResult]]:
    """The parts by stage, in the order of the recipe."""
    stages = defaultdict[str, list[PartResult]](list)
    for part in parts:
        stages[part.stage].append(part)
    return dict(stages)
