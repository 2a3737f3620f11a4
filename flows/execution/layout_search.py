"""Searches the layouts of a part: ranks all layouts by formulas, and rehearses the fastest for their memory.

Invariant: every layout that is found passes the checks of the recipe, and its rehearsed peak fits the GPU.
"""

from collections.abc import Callable, Sequence
from math import log
from statistics import StatisticsError, correlation
from typing import Any

from apertus_model.rehearsal.rates import Rates
from apertus_model.rehearsal.records import PartResult
from flows.execution.rehearsal import check_gpu, rehearse
from flows.planning.estimate.memory import memory_of_rank
from flows.planning.estimate.step_time import of_rank
from flows.planning.estimate.training import PartEstimate
from flows.planning.layouts import Layout, layouts
from specs.base import Strict
from specs.cluster import GPUS
from specs.errors import FieldPath, StageError

BEST = 5
MOST_TRIED = 4 * BEST  # layouts that are rehearsed

Accept = Callable[[Layout], PartEstimate | str]
"""Returns the part in a layout, or the reason why the checks of its recipe refuse it."""


class Found(Strict):
    """A layout with its speed and memory, as expected by formulas and as rehearsed."""

    launch: dict[str, Any]
    settings: dict[str, Any]
    yaml: str  # `launch` and `settings`, to paste
    expected: float  # tokens per second and GPU, by formulas
    planned_memory: int  # bytes, by formulas
    tokens_per_second_per_gpu: float | None = None
    memory: int | None = None  # rehearsed peak
    dropped: str = ""  # why the layout was dropped


class Search(Strict):
    """The output of `apertus rehearse --search --json`."""

    pipeline: str
    stage: str
    part: str
    gpu: str
    gpus: int
    memory_limit: int  # bytes
    layouts: int  # that were compared
    own: Found  # the layout of the recipe
    own_gpus: int
    best: list[Found]  # by rehearsed speed
    dropped: list[Found]
    # tokens per second and GPU of the best layout in float8, by formulas; training in float8 has other
    # results. None where the layout uses float8 already, or cannot use it
    float8: float | None
    # Spearman's coefficient of the expected and the predicted order of all rehearsed layouts, with speeds
    # rounded to about a percent
    agreement: float | None


def search(
    pipeline: str,
    part: PartEstimate,
    path: FieldPath,
    gpu: str,
    gpus_per_node: int,
    nodes: int | None,
    accept: Accept,
    begins: Callable[[int, str], None] = lambda fitting, text: None,
    number: int = BEST,
    run: Callable[..., PartResult] = rehearse,
) -> Search:
    """Searches the layouts of a part. StageError when no layout fits, or no rehearsal is possible.

    Args:
        path: of the phase of `part` in the recipe.
        nodes: number of nodes for the part; as many as it has by default.
        begins: called with how many layouts fit, and what is rehearsed next.
        number: of layouts to find, each of a different kind.
    """
    check_gpu(gpu)
    rates = Rates(gpu, gpus_per_node)
    processes = part.gpus if nodes is None else nodes * gpus_per_node
    limit = GPUS[gpu].memory
    known = layouts(part.segment, processes, rates)
    if not any(layout.memory <= limit for layout in known):
        raise StageError(_nothing(part, processes, limit, known, []))
    begins(0, f"the recipe's own layout, beside {len(known):,} others")
    own = _rehearsed(Layout(part.segment, part.gpus, rates), path, part, run)
    best, dropped, done = list[Found](), list[Found](), set[Any]()  # done: kinds of layouts
    for layout in known:
        if len(best) == number or len(best) + len(dropped) == MOST_TRIED:
            break
        if layout.kind in done or layout.memory > limit:
            continue
        planned = accept(layout)
        if isinstance(planned, str):
            done.add(layout.kind)
            continue
        begins(len(best), described(layout.launch, layout.settings))
        rehearsed = _rehearsed(layout, path, planned, run)
        if not rehearsed.dropped and (rehearsed.memory or 0) > limit:
            rehearsed = rehearsed.model_copy(update={"dropped": "its peak is more than the GPU has"})
        else:
            done.add(layout.kind)
        (dropped if rehearsed.dropped else best).append(rehearsed)
    if not best:
        raise StageError(_nothing(part, processes, limit, known, dropped))
    best = sorted(best, key=lambda layout: -(layout.tokens_per_second_per_gpu or 0.0))
    fastest = next(
        layout for layout in known if (layout.launch, layout.settings) == (best[0].launch, best[0].settings)
    )
    run_too = [layout for layout in (own, *best, *dropped) if layout.tokens_per_second_per_gpu is not None]
    return Search(
        pipeline=pipeline,
        stage=part.node.stage,
        part=part.node.name,
        gpu=gpu,
        gpus=processes,
        memory_limit=round(limit),
        layouts=len(known),
        own=own,
        own_gpus=part.gpus,
        best=best,
        dropped=dropped,
        float8=_in_float8(fastest, accept),
        agreement=spearman(
            [_percents(layout.expected) for layout in run_too],
            [_percents(layout.tokens_per_second_per_gpu) for layout in run_too],
        ),
    )


def _in_float8(layout: Layout, accept: Accept) -> float | None:
    segment = layout.segment
    if segment.precision.linear != "param" or GPUS[layout.rates.name].float8_flops is None:
        return None
    precision = segment.precision.model_copy(update={"linear": "float8"})
    other = Layout(segment.model_copy(update={"precision": precision}), layout.processes, layout.rates)
    return None if isinstance(accept(other), str) else other.tokens_per_second_per_gpu


def described(launch: dict[str, Any], settings: dict[str, Any]) -> str:
    """A layout in one line: degrees above 1, micro-batch and recomputation."""
    degrees = launch["parallel"]
    names = ("dp_replicate", "dp_shard", "tp", "cp", "pp")
    parts = [f"{name} {degrees[name]}" for name in names if degrees[name] > 1]
    if degrees["tp"] > 1 and degrees["sequence_parallel"]:
        parts.append("sequence parallel")
    if degrees["pp"] > 1:
        virtual = degrees["virtual_stages"]
        parts.append(degrees["pp_schedule"] + (f" of {virtual}" if virtual else ""))
    size = settings["micro_batch_size"]
    parts.append(f"micro-batch {'whole' if size is None else size}")
    if (again := settings["activation_checkpointing"]) != "none":
        parts.append(f"recomputation {again}")
    return ", ".join(parts)


def _rehearsed(layout: Layout, path: FieldPath, part: PartEstimate, run: Callable[..., PartResult]) -> Found:
    result = run(part, layout.rates.name, layout.rates.gpus_per_node, busiest_ranks(layout))
    peaks = [rank.report.rehearsed.memory.total for rank in result.ranks if rank.report.rehearsed is not None]
    return Found(
        launch=layout.launch,
        settings=layout.settings,
        yaml=layout.to_yaml(path),
        expected=layout.tokens_per_second_per_gpu,
        planned_memory=round(layout.memory),
        tokens_per_second_per_gpu=result.tokens_per_second_per_gpu,
        memory=max(peaks, default=None),
        dropped=result.failures[0][1].error if result.failures else "",
    )


def busiest_ranks(layout: Layout) -> list[int]:
    """The ranks of a pipeline that need the most memory, and the most time, by formulas."""
    segment, world = layout.segment, layout.processes
    stages = range(segment.parallel.pp)
    fullest = max(stages, key=lambda stage: memory_of_rank(segment, world, stage).total)
    slowest = max(stages, key=lambda stage: of_rank(segment, world, stage, layout.rates).total)
    return sorted({stage * (world // segment.parallel.pp) for stage in (fullest, slowest)})


def _nothing(
    part: PartEstimate, processes: int, limit: float, known: Sequence[Layout], dropped: Sequence[Found]
) -> str:
    """The message that says why no layout was found."""
    on = f"{part.node.name} on {processes:,} GPUs"
    if not known:
        return (
            f"there is no layout of {on}: its batch of {part.segment.global_batch_size:,} sequences, its"
            " model or its sequences cannot be divided among them. Fix: choose another --nodes"
        )
    if dropped:
        return f"no layout of {on} can run; of the fastest: {dropped[0].dropped}"
    least = min(layout.memory for layout in known)
    if least > limit:
        needs = f"the smallest needs {least / 1e9:.1f} GB of a GPU that has {limit / 1e9:.0f} GB"
        return f"no layout of {on} fits: {needs}. Fix: raise --nodes, or choose another --gpu"
    return f"the recipe accepts no layout of {on}. Fix: choose another --nodes"


def _percents(speed: float | None) -> int:
    """The logarithm of a speed in whole percents, so that speeds within about a percent are ties."""
    return round(100 * log(speed)) if speed else 0


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's rank correlation; None for fewer than three pairs, or only equal values on one side."""
    try:
        return correlation(_ranks(first), _ranks(second)) if len(first) > 2 else None
    except StatisticsError:
        return None


def _ranks(values: Sequence[float]) -> list[float]:
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) - 1) / 2
        for value in values
    ]
