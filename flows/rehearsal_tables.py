"""The tables of a rehearsed part, which the terminal and the report show: the memory of each rank beside the
plan, and details of the rank that has the largest peak.

Invariants: only units are computed here; every number comes from the rehearsal. Cells are plain text.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from apertus_model.rehearsal.records import KINDS, PartResult, Rehearsed
from flows.format import amount, duration, flop, size
from specs.errors import counted

LONGEST = 12  # operators


@dataclass(frozen=True)
class RehearsalTable:
    """Rows of a table. numbers: the first of the columns of numbers, counted from 0; optional: headings of
    columns that a narrow terminal leaves out, in this order."""

    title: str
    headings: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    numbers: int
    caption: str = ""
    optional: tuple[str, ...] = ()


def tables(part: PartResult) -> list[RehearsalTable]:
    """The tables of a part that have rows; an empty list if no rank builds."""
    if not part.built:
        return []
    rank, rehearsed = part.busiest
    every = [
        _memory(part),
        _tensors(rehearsed, f"largest tensors at the peak of rank {rank:,}"),
        _collectives(rehearsed, f"collectives of a step of rank {rank:,}"),
        _waits(rehearsed, f"waits for the GPU in a step of rank {rank:,}"),
        _operators(part, rehearsed, f"predicted time of a step of rank {rank:,} on {part.gpu}"),
    ]
    return [table for table in every if table.rows]


def _memory(part: PartResult) -> RehearsalTable:
    rows = []
    for rank in part.ranks:
        if (rehearsed := rank.report.rehearsed) is None:
            continue
        memory = [*(rehearsed.memory.kinds[kind] for kind in KINDS), rehearsed.memory.total]
        planned = (size(rank.planned_memory["total"]), f"{rank.memory_difference:+.1%}")
        operations = (flop(sum(rehearsed.flops.values())), f"{rank.flops_ratio:.3f}")
        rows.append((f"{rank.rank:,}", str(rank.pipeline_rank), *map(size, memory), *planned, *operations))
    headings = ("rank", "stage", "weights", "grads", "states", "kept", "gathered", "rest", "total", "plan",
                "difference", "FLOPs", "of plan")  # fmt: skip
    caption = (
        "kept: activations; gathered: communication; difference: of the plan's estimate; of plan: FLOPs"
        " beside the formula, whose scores are not computed again"
    )
    title = f"memory of a GPU at the peak of a step, of {counted(part.gpus, 'GPU')}"
    return RehearsalTable(title, headings, rows, 0, caption, ("stage", "of plan", "FLOPs"))


def _tensors(rehearsed: Rehearsed, title: str) -> RehearsalTable:
    rows = [
        (line.operator, " × ".join(map(str, line.shape)), line.dtype, line.kind.replace("_", " "),
         f"{line.number:,}", size(line.bytes))
        for line in rehearsed.memory.largest
    ]  # fmt: skip
    return RehearsalTable(title, ("made by", "shape", "dtype", "kind", "tensors", "total"), rows, 4)


def _collectives(rehearsed: Rehearsed, title: str) -> RehearsalTable:
    rows = [
        (line.kind, line.mesh, f"{line.ranks:,}", f"{line.calls:,}", f"{line.asynchronous:,}",
         size(line.bytes), duration(line.seconds), duration(line.hidden_seconds or None))
        for line in rehearsed.collectives
    ]  # fmt: skip
    headings = ("collective", "mesh", "GPUs", "calls", "async", "total", "time", "hidden")
    caption = (
        "total: bytes of the whole tensors, summed over calls; async: not waited for by the call itself (FSDP"
        " uses a stream of its own); time: predicted; hidden: of the time, beside products"
    )
    return RehearsalTable(title, headings, rows, 2, caption, ("hidden",))


def _waits(rehearsed: Rehearsed, title: str) -> RehearsalTable:
    rows = [(line.place, line.what, f"{line.calls:,}") for line in rehearsed.synchronisations]
    return RehearsalTable(title, ("place", "what", "calls"), rows, 2)


def _operators(part: PartResult, rehearsed: Rehearsed, title: str) -> RehearsalTable:
    rows = [
        (line.operator, line.kind, f"{line.calls:,}", flop(line.flops), size(line.bytes),
         duration(line.seconds), f"{line.seconds / rehearsed.compute_seconds:.1%}")
        for line in rehearsed.operators[:LONGEST]
    ]  # fmt: skip
    rows.append(("all operators", "", "", "", "", duration(rehearsed.compute_seconds), ""))
    rows.append(("collectives that are waited for", "", "", "", "", duration(rehearsed.waited_seconds), ""))
    caption = (
        f"at the data sheet's rates, {rehearsed.bound:.0%} of the operators' time is matrix products and"
        " attention: no more of the GPU's peak can be used"
    )
    if part.step_seconds is not None:
        step = f"a step of the part: {duration(part.step_seconds)} with {part.bubble:.1%} of bubble"
        caption += f"; {step}, {amount(part.tokens_per_second_per_gpu)} tokens per second and GPU"
    headings = ("operator", "class", "calls", "FLOPs", "total", "time", "of all")
    return RehearsalTable(title, headings, rows, 2, caption)
