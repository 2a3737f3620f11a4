"""Tables of estimates and of the comparison of two plans.

Invariant: only differences and units are computed here; every number comes from the plan.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flows.format import BYTES, amount, duration, energy, flop, size, unit_of
from flows.planning.comparison import TOTALS, PlanComparison
from flows.planning.estimate import Estimates
from flows.planning.estimate.inference import PartInference, spent_of
from flows.planning.estimate.memory import Memory
from flows.planning.estimate.time_and_cost import Spent
from flows.planning.estimate.training import StageEstimate
from flows.terminal import empty_table, table

Row = TypeVar("Row")
Rows = dict[str, list[str]]  # stages by the label of the row that they share
MEMORY_PARTS = {
    "weights": "weights", "gradients": "grads", "optimizer_states": "states", "activations": "kept",
    "working": "working",
    "output": "output", "communication": "gathered", "update": "update",
}  # fmt: skip
assert set(MEMORY_PARTS) == set(Memory.__dataclass_fields__) - {"moment"}


def _by_columns(
    title: str,
    caption: str,
    labels: str,
    rows: Iterable[tuple[str, Row]],
    columns: dict[str, Callable[[Row], str]],
    optional: tuple[str, ...],
    width: int,
) -> Table:
    """A table of labelled rows; `labels`: heading of the labels; `columns`: heading -> cell of a row."""
    cells = [[escape(label), *(cell(row) for cell in columns.values())] for label, row in rows]
    return table(title, caption, (labels, *columns), cells, optional=optional, width=width)


def estimate_table(estimates: Estimates, rows_of: Rows, asked: Rows, width: int) -> Table:
    """A table with a line per label of `rows_of` for stages that train, which are alike; a line per label of
    `asked` for stages that sample or score, which are variants of one stage; and the totals."""
    rows = []
    for label, names in rows_of.items():
        stages = [estimates.stages[name] for name in names]
        first, need = stages[0], stages[0].largest.memory.total
        too_large = first.cluster is not None and need > first.cluster.device.memory
        memory = f"[red]{size(need)}[/]" if too_large else size(need)
        spent = Spent.of(stage.spent for stage in stages)._asdict()
        flops = sum(part.flops for stage in stages for part in stage.parts)
        gpus, checkpoint = str(first.parts[0].gpus), size(first.parts[-1].checkpoints.bytes)
        rows.append([escape(label), gpus, *_spent(spent, flops), memory, checkpoint])
    for label, names in asked.items():
        parts = [part for name in names for part in estimates.inference[name].parts]
        spent = spent_of(parts)._asdict()
        flops = sum(part.flops for part in parts)
        rows.append([escape(label), str(estimates.inference[names[0]].gpus), *_spent(spent, flops), "", ""])
    totals = estimates.totals()
    rows.append(["all", "", *_spent(totals, totals["flops"]), size(totals["memory_bytes"]), ""])
    headings = ("stage", "GPUs", "FLOPs", "time", "GPU-hours", "energy", "cost", "per GPU", "checkpoint")
    optional = ("energy", "cost", "GPU-hours", "time")
    return table("what it takes", _caption(estimates, totals), headings, rows, optional=optional, width=width)


def _spent(spent: dict[str, Any], flops: int) -> list[str]:
    energies, hours = energy(spent["energy_kwh"]), amount(spent["gpu_hours"])
    return [flop(flops), duration(spent["seconds"]), hours, energies, amount(spent["cost"])]


def inference_table(estimates: Estimates, rows_of: Rows, width: int) -> Table:
    """The work that sampling or scoring parts ask of their models, by label of `rows_of`."""
    parts = {part.node.name: part for part in estimates.asking}
    rows = {label: [parts[name] for name in names] for label, names in rows_of.items()}

    def counted(row: list[PartInference]) -> str:
        source, without = row[0].work.source if row[0].counted else "", row[0].work.missing
        return escape(", ".join(filter(None, [source, f"not: {without}" if without else ""])))

    def sum_of_counted(row: list[PartInference], name: str) -> str:
        return amount(round(sum(getattr(part.work, name) for part in row if part.counted)))

    return _by_columns(
        "sampling and scoring",
        "tokens read: prompts, and text that is scored; at most: what the settings allow",
        "part",
        rows.items(),
        {
            "requests": lambda row: sum_of_counted(row, "requests"),
            "read": lambda row: sum_of_counted(row, "read_tokens"),
            "sampled": lambda row: sum_of_counted(row, "sampled_tokens"),
            "time": lambda row: duration(spent_of(row).seconds),
            "time by": lambda row: row[0].time_source or "-",
            "counted": counted,
        },
        ("time by", "requests", "time"),
        width,
    )


def corpora_line(estimates: Estimates) -> str:
    """The resources that making all corpora takes, in one line."""
    totals, works = estimates.totals(), list(estimates.corpora.values())
    times = [duration(work.seconds) for work in works if work.seconds is not None]
    without = ", ".join(dict.fromkeys(work.missing for work in works if work.missing))
    facts = [
        f"{amount(totals['core_hours'])} core-hours",
        f"{' and '.join(times)} by their workers" if len(times) == len(works) else "",
        f"{size(totals['corpus_moved_bytes'])} moved",
        f"at most {size(totals['corpus_temporary_bytes'])} temporary",
        f"without {without}" if without else "",
    ]
    return ", ".join(filter(None, facts))


def corpus_table(estimates: Estimates, width: int) -> Table:
    """The resources that making corpora takes, by part."""
    return _by_columns(
        "making corpora and conversations",
        "moved: bytes read and written; temporary: most that is stored beside documents and result; sizes:"
        " measured, declared or by the files",
        "corpus",
        ((part.node.name, part) for work in estimates.corpora.values() for part in work.parts),
        {
            "text": lambda part: size(part.text_bytes),
            "tokens": lambda part: amount(round(part.tokens)),
            "core-hours": lambda part: amount(part.core_seconds / 3600),
            "time": lambda part: duration(part.seconds),
            "moved": lambda part: size(part.moved_bytes),
            "temporary": lambda part: size(part.temporary_bytes),
            "tasks": lambda part: "-" if part.tasks is None else f"{part.tasks:,}",
            "sizes": lambda part: part.source,
        },
        ("tasks", "time", "sizes", "text"),
        width,
    )


def _caption(estimates: Estimates, totals: dict[str, Any]) -> str:
    cluster = estimates.cluster
    stay, most = size(totals["stored_bytes"]), size(totals["peak_storage_bytes"])
    stored = f"checkpoints: {stay} stay, at most {most} at a time"
    if cluster is None:
        return f"the recipe has no cluster:, so no time, energy or cost; {stored}"
    mfus: dict[str, list[float]] = {}
    for part in estimates.parts:
        if part.mfu is not None:
            mfus.setdefault(part.mfu_source or "", []).append(part.mfu)
    ranges = [
        f"{'' if min(of) == max(of) else f'{min(of):.1%} to '}{max(of):.1%} {source}"
        for source, of in mfus.items()
    ]
    mfu = f"MFU {', '.join(ranges)}" if ranges else "no MFU is stated (cluster.mfu), and none was measured"
    beside = len({span.begin for span in estimates.spans.values()}) < len(estimates.spans)
    gpus = f"{cluster.gpus_per_node} {cluster.gpu} ({size(cluster.device.memory)})"
    nodes = f"{cluster.nodes:,} node{'s' * (cluster.nodes > 1)} of {gpus}"
    return "; ".join([nodes, mfu, *(["time of all: with parts side by side"] if beside else []), stored])


def memory_table(estimates: Estimates, rows_of: Rows, width: int) -> Table:
    """The memory of a GPU at its peak, by stage and part of the memory, in the unit of the largest total."""
    most = max(stage.largest.memory.total for stage in estimates.stages.values())
    divisor, unit = unit_of(most, BYTES[2:])

    def column(name: str) -> Callable[[StageEstimate], str]:
        def shown(stage: StageEstimate) -> str:
            value = getattr(stage.largest.memory, name) / divisor
            return f"{value:.3g}" if value >= 1 else f"{value:.2f}" if value else "-"

        return shown

    return _by_columns(
        f"memory of a GPU ({unit})",
        "states: of the optimizer; kept: activations; gathered: weights and gradients between GPUs",
        "stage",
        _first(estimates, rows_of),
        {
            **{heading: column(name) for name, heading in MEMORY_PARTS.items()},
            "total": column("total"),
            "peak at": lambda stage: stage.largest.memory.moment,
        },
        ("update", "peak at"),
        width,
    )


def checkpoint_table(estimates: Estimates, rows_of: Rows, width: int) -> Table:
    """Checkpoints of a stage: sizes, intervals, storage and requests."""

    def number(stage: StageEstimate, name: str) -> str:
        return f"{sum(getattr(part.checkpoints, name) for part in stage.parts):,}"

    def bytes_of(stage: StageEstimate, name: str) -> str:
        saved = (part.checkpoints for part in stage.parts)
        return size(sum(getattr(checkpoints, name) * checkpoints.bytes for checkpoints in saved))

    return _by_columns(
        "checkpoints",
        "stop: stall of training; requests: to object storage, to write each; of variants: one of them",
        "stage",
        _first(estimates, rows_of),
        {
            "each": lambda stage: size(stage.parts[-1].checkpoints.bytes),
            "stop": lambda stage: duration(stage.costliest.saving.copy),
            "write": lambda stage: duration(stage.costliest.saving.upload),
            "every": lambda stage: duration(stage.costliest.saving.interval),
            "Young/Daly": lambda stage: duration(stage.costliest.saving.best),
            "written": lambda stage: number(stage, "written"),
            "in all": lambda stage: bytes_of(stage, "written"),
            "kept": lambda stage: number(stage, "kept"),
            "stored": lambda stage: bytes_of(stage, "kept"),
            "requests": lambda stage: f"{sum(stage.parts[-1].requests):,}",
        },
        ("stop", "write", "Young/Daly", "requests", "in all", "every"),
        width,
    )


def segment_table(estimates: Estimates, width: int) -> Table:
    """Begin and end of each segment, the labels that Goldfish leaves out, and the bytes stored after it."""
    from flows.inspection.goldfish import masked_by_hash  # loads numpy; only details need it

    after, _ = estimates.stored()
    parts = {part.node.name: part for part in estimates.parts}
    return _by_columns(
        "segments of training",
        "in the order of their ends; steps and tokens of the stage before and after; masked: labels that"
        " Goldfish leaves out, nominally, and by its hash for uniform ids; stored: checkpoints, after the"
        " part",
        "part",
        ((name, parts[name]) for name in after),
        {
            "from step": lambda part: f"{part.segment.start_step:,}",
            "to step": lambda part: f"{part.segment.end_step:,}",
            "from token": lambda part: amount(part.segment.start_tokens),
            "to token": lambda part: amount(part.segment.tokens_at(part.segment.end_step)),
            "masked 1/k": lambda part: amount(part.masked_labels),
            "by hash": lambda part: amount(masked_by_hash(part.segment, part.node.tokens)),
            "stored": lambda part: size(after[part.node.name]),
        },
        ("masked 1/k", "by hash", "from token"),
        width,
    )


def _first(estimates: Estimates, rows_of: Rows) -> list[tuple[str, StageEstimate]]:
    """The labels of the rows, each with its first stage."""
    return [(label, estimates.stages[names[0]]) for label, names in rows_of.items()]


def show_comparison(console: Console, comparison: PlanComparison, name: str, against: str) -> None:
    """Prints two plans side by side, totals first."""
    compared = (escape(against), escape(name), "difference")
    numbers = empty_table("totals", ("", *compared), numbers=compared, folded=compared)
    for key, (before, now) in comparison.totals.items():
        label, shown = TOTALS[key]
        pair = [shown(value) if value else "-" for value in (before, now)]
        change = f"{now / before - 1:+.1%}" if before and now is not None else "-"
        numbers.add_row(label, *pair, change)
    console.print(numbers)
    if not comparison.fields:
        console.print("no field differs")
        return
    headings = ("field", *compared[:2])
    fields = empty_table("fields that differ", headings, folded=headings)
    for stage, differing in comparison.by_stage.items():
        if stage:
            fields.add_row(f"[bold]stages.{escape(stage)}[/]")
        for field, values in differing.items():
            shown_values = (escape("not set" if value is None else str(value)) for value in values)
            fields.add_row(f"{'  ' * bool(stage)}{escape(field)}", *shown_values)
    console.print(fields)
