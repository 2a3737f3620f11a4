"""Tables of a rehearsal and of a search for layouts.

Invariant: only units are computed here; every number comes from the rehearsal or the search.
"""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from apertus_model.rehearsal.records import KINDS, PartResult, Rehearsed
from flows.execution.layout_search import Found, Search, described
from flows.format import amount, duration, flop, size
from flows.terminal import table

LONGEST = 6  # operators


def show_part(console: Console, part: PartResult) -> None:
    """Prints the result for a part: a line per rank, and details of the rank that has the largest peak."""
    for rank, failure in part.failures:
        why = failure.error + (f" ({failure.place})" if failure.place else "")
        which = f"[red]rank {rank} of {part.gpus} of {escape(part.part)} does not build:[/]"
        console.print(f"{which} {escape(why)}", soft_wrap=True)
    if not part.built:
        return
    rank, rehearsed = part.busiest
    tables = [_memory(part, console.width), _tensors(rehearsed, rank, console.width)]
    if rehearsed.collectives:
        tables.append(_collectives(rehearsed, rank, console.width))
    tables.append(_waits(rehearsed, rank, console.width))
    tables.append(_time(part, rehearsed, rank, console.width))
    for printed in tables:
        console.print(printed)
        console.print()


def _memory(part: PartResult, width: int) -> Table:
    rows = []
    for rank in part.ranks:
        if (rehearsed := rank.report.rehearsed) is None or rank.memory_difference is None:
            continue
        kinds = [size(rehearsed.memory.kinds[kind]) for kind in KINDS]
        planned = [size(rank.planned_memory["total"]), f"{rank.memory_difference:+.1%}"]
        operations = sum(rehearsed.flops.values())
        rows.append(
            [str(rank.rank), str(rank.pipeline_rank), *kinds, size(rehearsed.memory.total), *planned,
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


def _tensors(rehearsed: Rehearsed, rank: int, width: int) -> Table:
    rows = [
        [size(line.bytes), str(line.number), escape(str(list(line.shape))), line.dtype, line.kind,
         escape(line.operator)]
        for line in rehearsed.memory.largest
    ]  # fmt: skip
    headings = ("total", "tensors", "shape", "dtype", "kind", "operator")
    return table(f"largest tensors at the peak of rank {rank}", "", headings, rows, width=width)


def _collectives(rehearsed: Rehearsed, rank: int, width: int) -> Table:
    rows = [
        [line.kind, line.mesh, str(line.ranks), f"{line.calls:,}", str(line.asynchronous), size(line.bytes),
         duration(line.seconds)]
        for line in rehearsed.collectives
    ]  # fmt: skip
    headings = ("collective", "mesh", "GPUs", "calls", "async", "total", "time")
    caption = (
        "total: bytes of the whole tensors, summed over calls; async: not waited for by the call itself (FSDP"
        " uses a stream of its own); time: predicted"
    )
    return table(f"collectives of a step of rank {rank}", caption, headings, rows, width=width)


def _waits(rehearsed: Rehearsed, rank: int, width: int) -> Table:
    rows = [[f"{line.calls:,}", line.what, escape(line.place)] for line in rehearsed.synchronisations]
    return table(
        f"waits for the GPU in a step of rank {rank}", "", ("calls", "what", "place"), rows, width=width
    )


def _time(part: PartResult, rehearsed: Rehearsed, rank: int, width: int) -> Table:
    rows = [
        [escape(line.operator), line.kind, f"{line.calls:,}", flop(line.flops), size(line.bytes),
         duration(line.seconds)]
        for line in rehearsed.operators[:LONGEST]
    ]  # fmt: skip
    rows.append(["all operators", "", "", "", "", duration(rehearsed.compute_seconds)])
    rows.append(["collectives that are waited for", "", "", "", "", duration(rehearsed.waited_seconds)])
    caption = (
        f"at the data sheet's rates, {rehearsed.bound:.0%} of the operators' time is matrix products and"
        " attention: no more of the GPU's peak can be used"
    )
    if part.step_seconds is not None:
        step = f"a step of the part: {duration(part.step_seconds)} with {part.bubble:.1%} of bubble"
        caption += f"\n{step}, {amount(part.tokens_per_second_per_gpu)} tokens per second and GPU"
    headings = ("operator", "class", "calls", "FLOPs", "total", "time")
    title = f"predicted time of a step of rank {rank} on {part.gpu}"
    return table(title, caption, headings, rows, width=width)


# A search for layouts


def show_search(console: Console, search: Search) -> None:
    """Prints the layouts found, fastest first, beside the recipe's own, and each as YAML to paste."""
    rows = [_row(str(number), layout, search) for number, layout in enumerate(search.best, 1)]
    rows.append(_row("own", search.own, search))
    rows += [_row("-", layout, search) for layout in search.dropped]
    headings = ("", "memory", "of plan", "expected", "predicted", "beside own", "layout")
    caption = (
        f"memory: rehearsed, of {size(search.memory_limit)} that the {search.gpu} has; tokens per second and"
        " GPU, expected by formulas and predicted by a rehearsal"
    )
    if search.agreement is not None:
        caption += f"; their orders agree by {search.agreement:.2f} (Spearman)"
    title = f"{search.part} on {search.gpus:,} GPUs: the best of {search.layouts:,} layouts"
    if search.own_gpus != search.gpus:
        title += f"; the recipe has {search.own_gpus:,} GPUs"
    console.print(
        table(title, caption, headings, rows, optional=("of plan", "expected"), width=console.width)
    )
    if search.float8 is not None:
        changes = "precision.linear: float8 changes results and fingerprint; layout 1 with it"
        speed = f"{amount(search.float8)} tokens/s expected, {search.float8 / search.best[0].expected:.2f}"
        console.print(f"{changes}: {speed} of the same without", highlight=False, soft_wrap=True)
    for number, layout in enumerate(search.best, 1):
        console.print(f"\n# {number}: {escape(described(layout.launch, layout.settings))}", highlight=False)
        console.print(escape(layout.yaml.rstrip()), highlight=False, soft_wrap=True)


def _row(name: str, result: Found, search: Search) -> list[str]:
    own, speed = search.own.tokens_per_second_per_gpu, result.tokens_per_second_per_gpu
    layout = described(result.launch, result.settings)
    return [
        name,
        size(result.memory) if result.memory is not None else "",
        f"{result.planned_memory / result.memory - 1:+.1%}" if result.memory else "",
        amount(result.expected),
        amount(speed) if speed is not None else "",
        f"{speed / own:.2f}" if speed is not None and own else "",
        escape(f"{layout}: {result.dropped}" if result.dropped else layout),
    ]
