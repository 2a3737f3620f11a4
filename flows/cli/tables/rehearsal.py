"""Tables of a rehearsal.

Invariant: only units are computed here; every number comes from the rehearsal.
"""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from apertus_model.rehearsal.records import KINDS, Rehearsed
from flows.cli.tables import table
from flows.cli.tables.estimate import duration, size
from flows.execution.rehearsal import PartResult
from flows.format import amount, flop

LONGEST = 6  # operators


def show_part(console: Console, part: PartResult) -> None:
    """Prints the result for a part: a line per rank, and details of the rank that has the largest peak."""
    for rank, failure in part.failures:
        where = f" ({failure.place})" if failure.place else ""
        console.print(
            f"[red]rank {rank} of {part.gpus} of {escape(part.part)} does not build:[/]"
            f" {escape(failure.error)}{escape(where)}",
            soft_wrap=True,
        )
    built = [(rank, found) for rank in part.ranks if (found := rank.report.rehearsed) is not None]
    if not built:
        return
    largest, found = max(built, key=lambda pair: pair[1].memory.total)
    tables = [_memory(part, console.width), _tensors(found, largest.rank, console.width)]
    if found.collectives:
        tables.append(_collectives(found, largest.rank, console.width))
    tables.append(_waits(found, largest.rank, console.width))
    tables.append(_time(part, found, largest.rank, console.width))
    for one in tables:
        console.print(one)
        console.print()


def _memory(part: PartResult, width: int) -> Table:
    rows = []
    for rank in part.ranks:
        if (found := rank.report.rehearsed) is None or rank.memory_difference is None:
            continue
        kinds = [size(found.memory.kinds[kind]) for kind in KINDS]
        planned = [size(rank.planned_memory["total"]), f"{rank.memory_difference:+.1%}"]
        operations = sum(found.flops.values())
        rows.append(
            [str(rank.rank), str(rank.pipeline_rank), *kinds, size(found.memory.total), *planned,
             flop(operations), f"{rank.flops_ratio:.3f}"]
        )  # fmt: skip
    headings = ("rank", "stage", "weights", "grads", "states", "kept", "gathered", "rest", "total", "plan",
                "difference", "FLOPs", "of plan")  # fmt: skip
    caption = (
        "memory of a GPU at the peak of a step; kept: activations; gathered: communication; difference: of"
        " the plan's estimate; of plan: FLOPs beside the formula, whose scores are not computed again"
    )
    title = f"{escape(part.part)}: {part.gpus:,} GPUs"
    return table(title, caption, headings, rows, optional=("stage", "of plan", "FLOPs"), width=width)


def _tensors(found: Rehearsed, rank: int, width: int) -> Table:
    rows = [
        [size(line.bytes), str(line.number), escape(str(list(line.shape))), line.dtype, line.kind,
         escape(line.operator)]
        for line in found.memory.largest
    ]  # fmt: skip
    headings = ("total", "tensors", "shape", "dtype", "kind", "operator")
    return table(f"largest tensors at the peak of rank {rank}", "", headings, rows, width=width)


def _collectives(found: Rehearsed, rank: int, width: int) -> Table:
    rows = [
        [line.kind, line.mesh, str(line.ranks), f"{line.calls:,}", str(line.asynchronous), size(line.bytes),
         duration(line.seconds)]
        for line in found.collectives
    ]  # fmt: skip
    headings = ("collective", "mesh", "GPUs", "calls", "async", "total", "time")
    caption = (
        "total: bytes of the whole tensors, summed over calls; async: not waited for by the call itself (FSDP"
        " uses a stream of its own); time: predicted"
    )
    return table(f"collectives of a step of rank {rank}", caption, headings, rows, width=width)


def _waits(found: Rehearsed, rank: int, width: int) -> Table:
    rows = [[f"{line.calls:,}", line.what, escape(line.place)] for line in found.synchronisations]
    return table(
        f"waits for the GPU in a step of rank {rank}", "", ("calls", "what", "place"), rows, width=width
    )


def _time(part: PartResult, found: Rehearsed, rank: int, width: int) -> Table:
    longest = found.operators[:LONGEST]
    rows = [
        [escape(line.operator), line.kind, f"{line.calls:,}", flop(line.flops), size(line.bytes),
         duration(line.seconds)]
        for line in longest
    ]  # fmt: skip
    rows.append(["all operators", "", "", "", "", duration(found.compute_seconds)])
    rows.append(["collectives that are waited for", "", "", "", "", duration(found.waited_seconds)])
    caption = (
        f"at the data sheet's rates, {found.bound:.0%} of the operators' time is matrix products and"
        " attention: no more of the GPU's peak can be used"
    )
    step = (
        f"\na step of the part: {duration(part.step_seconds)} with {part.bubble:.1%} of bubble,"
        f" {amount(part.tokens_per_second_per_gpu)} tokens per second and GPU"
        if part.step_seconds is not None and part.tokens_per_second_per_gpu is not None
        else ""
    )
    headings = ("operator", "class", "calls", "FLOPs", "total", "time")
    title = f"predicted time of a step of rank {rank} on {part.gpu}"
    return table(title, caption + step, headings, rows, width=width)
