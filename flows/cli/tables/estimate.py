"""Tables of estimates and of the comparison of two plans.

Invariant: only differences and units are computed here; every number comes from the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flows.cli.tables import table
from flows.format import ROUNDED_UP, amount, flop
from flows.planning.comparison import Comparison
from flows.planning.estimate import Estimates
from flows.planning.estimate.memory import Memory
from flows.terminal import empty_table

Rows = dict[str, list[str]]  # stages by the label of the row that they share
MEMORY_PARTS = {
    "weights": "weights", "gradients": "grads", "optimizer_states": "states", "activations": "kept",
    "working": "working",
    "output": "output", "communication": "gathered", "update": "update",
}  # fmt: skip
assert set(MEMORY_PARTS) == set(Memory.__dataclass_fields__) - {"moment"}
SPENT = ("flops", "seconds", "gpu_hours", "energy_kwh", "cost")
TOTALS: dict[str, tuple[str, Callable[[Any], str]]] = {  # label and format, by key of `Estimates.totals`
    "parameters": ("parameters", amount),
    "tokens": ("tokens of training", amount),
    "steps": ("steps", lambda value: f"{value:,}"),
    "sampled_tokens": ("tokens sampled", amount),
    "read_tokens": ("tokens read", amount),
    "flops": ("FLOPs", flop),
    "gpu_hours": ("GPU-hours", amount),
    "core_hours": ("core-hours of data", amount),
    "seconds": ("time", lambda value: duration(value)),
    "energy_kwh": ("energy", lambda value: energy(value)),
    "cost": ("cost", amount),
    "memory_bytes": ("memory of a GPU", lambda value: size(value)),
    "peak_storage_bytes": ("most that is stored", lambda value: size(value)),
}


def duration(seconds: float | None) -> str:
    """A duration as `83 d`, `4.2 h`, `12 min` or `30 s`; `-` if it is unknown."""
    if seconds is None:
        return "-"
    for limit, unit in ((86400 * 2, "d"), (3600, "h"), (60, "min")):
        if seconds >= limit:
            divisor = 86400 if unit == "d" else limit
            return f"{seconds / divisor:.3g} {unit}"
    return f"{seconds:.3g} s"


def size(count: float | None) -> str:
    """A number of bytes as `57.2 GB` (10^9); `-` if it is unknown."""
    if count is None:
        return "-"
    for limit, unit in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= limit * ROUNDED_UP:
            return f"{count / limit:.3g} {unit}"
    return f"{count:.0f} B"


def energy(kwh: float | None) -> str:
    """An energy as `3.2 GWh`; `-` if it is unknown."""
    if kwh is None:
        return "-"
    for limit, unit in ((1e6, "GWh"), (1e3, "MWh"), (1, "kWh"), (1e-3, "Wh")):
        if kwh >= limit * ROUNDED_UP:
            return f"{kwh / limit:.3g} {unit}"
    return f"{kwh * 1e3:.3g} Wh"


def estimate_table(
    estimates: Estimates, rows_of: Rows | None = None, width: int | None = None, asked: Rows | None = None
) -> Table:
    """A table with a line per stage that trains, or per label of `rows_of` for its stages, which are alike; a
    line per stage that samples or scores, or per label of `asked` for variants of a stage; and the totals."""
    rows = []
    for label, names in (rows_of or {name: [name] for name in estimates.stages}).items():
        documents = [estimates.stages[name].to_json() for name in names]
        first = documents[0]
        need = size(first["memory_bytes"]["total"])
        memory = f"[red]{need}[/]" if first["fits"] is False else need
        spent = {name: _sum([document[name] for document in documents]) for name in SPENT}
        rows.append(
            [escape(label), str(first["gpus"]), *_spent(spent), memory, size(first["checkpoint"]["bytes"])]
        )
    for label, names in (asked or {name: [name] for name in estimates.inference}).items():
        documents = [estimates.inference[name].to_json() for name in names]
        spent = {name: _known([document[name] for document in documents]) for name in SPENT}
        rows.append([escape(label), str(documents[0]["gpus"]), *_spent(spent), "", ""])
    totals = estimates.totals()
    rows.append(["all", "", *_spent(totals), size(totals["memory_bytes"]), ""])
    headings = ("stage", "GPUs", "FLOPs", "time", "GPU-hours", "energy", "cost", "per GPU", "checkpoint")
    optional = ("energy", "cost", "GPU-hours", "time")
    return table("what it takes", _caption(estimates, totals), headings, rows, optional=optional, width=width)


def _sum(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def inference_table(estimates: Estimates, rows_of: Rows | None = None, width: int | None = None) -> Table:
    """The work that sampling or scoring parts ask of their models, by part or by label of `rows_of`."""
    found = {part.node.name: part for part in estimates.asking}
    rows = []
    for label, names in (rows_of or {name: [name] for name in found}).items():
        documents = [found[name].to_json() for name in names]
        first = documents[0]
        numbers = [
            amount(_known([document[name] for document in documents]) or 0)
            for name in ("requests", "read_tokens", "sampled_tokens")
        ]
        seconds = _known([document["seconds"] for document in documents])
        without = f"not: {first['not_counted']}" if first["not_counted"] else ""
        counted = ", ".join(filter(None, [first["tokens_source"], without]))
        rows.append(
            [escape(label), *numbers, duration(seconds), first["time_source"] or "-", escape(counted)]
        )
    headings = ("part", "requests", "read", "sampled", "time", "time by", "counted")
    caption = "tokens read: prompts, and text that is scored; at most: what the settings allow"
    optional = ("time by", "requests", "time")
    return table("sampling and scoring", caption, headings, rows, optional=optional, width=width)


def corpora_line(estimates: Estimates) -> str:
    """The resources that making all corpora takes, in one line."""
    totals, works = estimates.totals(), list(estimates.corpora.values())
    times = [duration(work.seconds) for work in works if work.seconds is not None]
    without = ", ".join(dict.fromkeys(work.missing for work in works if work.missing))
    facts = [
        f"{amount(totals['core_hours'])} core-hours",
        *([f"{' and '.join(times)} by their workers"] if len(times) == len(works) else []),
        f"{size(totals['corpus_moved_bytes'])} moved",
        f"at most {size(totals['corpus_temporary_bytes'])} temporary",
        *([f"without {without}"] if without else []),
    ]
    return ", ".join(facts)


def corpus_table(estimates: Estimates, width: int | None = None) -> Table:
    """The resources that making corpora takes, by part."""
    rows = []
    for part in (part for work in estimates.corpora.values() for part in work.parts):
        found = part.to_json()
        numbers = [
            *(size(found["text_bytes"]), amount(found["tokens"]), amount(found["core_hours"])),
            duration(found["seconds"]),
            *(size(found["moved_bytes"]), size(found["temporary_bytes"])),
            "-" if found["tasks"] is None else f"{found['tasks']:,}",
        ]
        rows.append([escape(found["name"]), *numbers, found["sizes_source"]])
    headings = ("corpus", "text", "tokens", "core-hours", "time", "moved", "temporary", "tasks", "sizes")
    caption = (
        "moved: bytes read and written; temporary: most that is stored beside documents and result; sizes:"
        " measured, declared or by the files"
    )
    optional = ("tasks", "time", "sizes", "text")
    return table("making corpora and conversations", caption, headings, rows, optional=optional, width=width)


def _known(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _spent(document: dict[str, Any]) -> list[str]:
    hours, cost = document["gpu_hours"], document["cost"]
    numbers = [
        amount(hours) if hours is not None else "-",
        energy(document["energy_kwh"]),
        amount(cost) if cost is not None else "-",
    ]
    return [flop(document["flops"] or 0), duration(document["seconds"]), *numbers]


def _caption(estimates: Estimates, totals: dict[str, Any]) -> str:
    cluster = estimates.cluster
    stored = (
        f"checkpoints: {size(totals['stored_bytes'])} stay, at most {size(totals['peak_storage_bytes'])} at a"
        " time"
    )
    if cluster is None:
        return f"the recipe has no cluster:, so no time, energy or cost; {stored}"
    found: dict[str, list[float]] = {}
    for part in estimates.parts:
        if part.mfu is not None:
            found.setdefault(part.mfu_source or "", []).append(part.mfu)
    ranges = [
        f"{'' if min(of) == max(of) else f'{min(of):.1%} to '}{max(of):.1%} {source}"
        for source, of in found.items()
    ]
    mfu = f"MFU {', '.join(ranges)}" if ranges else "no MFU is stated (cluster.mfu), and none was measured"
    beside = len({span.begin for span in estimates.spans.values()}) < len(estimates.spans)
    gpus = f"{cluster.gpus_per_node} {cluster.gpu} ({size(cluster.device.memory)})"
    nodes = f"{cluster.nodes:,} node{'s' * (cluster.nodes > 1)} of {gpus}"
    return "; ".join([nodes, mfu, *(["time of all: with parts side by side"] if beside else []), stored])


def memory_table(estimates: Estimates, rows_of: Rows | None = None, width: int | None = None) -> Table:
    """The memory of a GPU at its peak, by stage and part of the memory, in the unit of the largest total."""
    most = max(stage.largest.memory.total for stage in estimates.stages.values())
    divisor, unit = next(
        ((divisor, unit) for divisor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if most >= divisor),
        (1, "bytes"),
    )
    rows = []
    for label, name in _first(estimates, rows_of):
        memory = estimates.stages[name].largest.memory
        values = [
            value / divisor for value in (*(getattr(memory, part) for part in MEMORY_PARTS), memory.total)
        ]
        rows.append(
            [
                escape(label),
                *(f"{value:.3g}" if value >= 1 else f"{value:.2f}" if value else "-" for value in values),
                memory.moment,
            ]
        )
    headings = ("stage", *MEMORY_PARTS.values(), "total", "peak at")
    caption = "states: of the optimizer; kept: activations; gathered: weights and gradients between GPUs"
    return table(
        f"memory of a GPU ({unit})", caption, headings, rows, optional=("update", "peak at"), width=width
    )


def checkpoint_table(estimates: Estimates, rows_of: Rows | None = None, width: int | None = None) -> Table:
    """Checkpoints of a stage: sizes, intervals, storage and requests."""
    rows = []
    for label, name in _first(estimates, rows_of):
        saved = estimates.stages[name].to_json()["checkpoint"]
        requests = sum(saved["requests_each"].values())
        numbers = [
            size(saved["bytes"]),
            *(duration(saved[f"{name}_seconds"]) for name in ("copy", "write", "interval", "young_daly")),
        ]
        numbers += [f"{saved['written']:,}", size(saved["written_bytes"])]
        rows.append(
            [escape(label), *numbers, f"{saved['kept']:,}", size(saved["kept_bytes"]), f"{requests:,}"]
        )
    headings = (
        "stage",
        "each",
        "stop",
        "write",
        "every",
        "Young/Daly",
        "written",
        "in all",
        "kept",
        "stored",
        "requests",
    )
    caption = "stop: stall of training; requests: to object storage, to write each; of variants: one of them"
    optional = ("stop", "write", "Young/Daly", "requests", "in all", "every")
    return table("checkpoints", caption, headings, rows, optional=optional, width=width)


def segment_table(estimates: Estimates, width: int | None = None) -> Table:
    """Begin and end of each segment, the labels that Goldfish leaves out, and the bytes stored after it."""
    from flows.inspection.goldfish import masked_by_hash  # loads numpy; only details need it

    after, _ = estimates.stored()
    rows = []
    for part in sorted(estimates.parts, key=lambda part: list(after).index(part.node.name)):
        found = part.to_json()
        steps = [f"{found[name]:,}" for name in ("start_step", "end_step")]
        tokens = [amount(found[name]) for name in ("start_tokens", "end_tokens", "masked_labels")]
        tokens.append(amount(masked_by_hash(part.segment, part.node.tokens)))
        rows.append([escape(part.node.name), *steps, *tokens, size(after[part.node.name])])
    headings = ("part", "from step", "to step", "from token", "to token", "masked 1/k", "by hash", "stored")
    caption = (
        "in the order of their ends; steps and tokens of the stage before and after; masked: labels that "
        "Goldfish leaves out, nominally, and by its hash for uniform ids; stored: checkpoints, after the "
        "part"
    )
    optional = ("masked 1/k", "by hash", "from token")
    return table("segments of training", caption, headings, rows, optional=optional, width=width)


def _first(estimates: Estimates, rows_of: Rows | None) -> list[tuple[str, str]]:
    """The labels of the rows, each with its first stage."""
    if rows_of is not None:
        return [(label, names[0]) for label, names in rows_of.items()]
    return [(name, name) for name in estimates.stages]


def show_comparison(console: Console, comparison: Comparison, name: str, against: str) -> None:
    """Prints two plans side by side, totals first."""
    compared = (escape(against), escape(name), "difference")
    numbers = empty_table("totals", ("", *compared), numbers=compared, folded=compared)
    for total, (before, now) in comparison.totals.items():
        label, shown = TOTALS[total]
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
        for field, (before, now) in differing.items():
            fields.add_row(
                f"{'  ' * bool(stage)}{escape(field)}", escape(_shown(before)), escape(_shown(now))
            )
    console.print(fields)


def _shown(value: Any) -> str:
    return "not set" if value is None else str(value)
