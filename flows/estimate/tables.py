"""Estimates, advice and the comparison of two plans as people see them.

Invariant: nothing here is computed but differences and units; every number comes from the plan.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flows.estimate import Estimates
from flows.estimate.against import Comparison
from flows.estimate.memory import Memory
from flows.plan import Plan
from flows.terminal import amount, table
from specs.advice import CODES

MEMORY_PARTS = {
    "weights": "weights", "gradients": "grads", "optimizer_states": "states", "activations": "kept", "working": "working",
    "output": "output", "communication": "gathered", "update": "update",
}  # fmt: skip
assert set(MEMORY_PARTS) == set(Memory.__dataclass_fields__) - {"moment"}
TOTALS = {  # of `Estimates.totals`: heading, and what a number of it is shown as
    "parameters": amount,
    "tokens": amount,
    "steps": lambda value: f"{value:,}",
    "flops": amount,
    "gpu_hours": amount,
    "seconds": lambda value: duration(value),
    "energy_kwh": lambda value: energy(value),
    "cost": amount,
    "memory_bytes": lambda value: size(value),
    "peak_storage_bytes": lambda value: size(value),
}


def duration(seconds: float | None) -> str:
    """`83 d`, `4.2 h`, `12 min`, `30 s`; `-` where it is not known."""
    if seconds is None:
        return "-"
    for limit, unit in ((86400 * 2, "d"), (3600, "h"), (60, "min")):
        if seconds >= limit:
            divisor = 86400 if unit == "d" else limit
            return f"{seconds / divisor:.3g} {unit}"
    return f"{seconds:.3g} s"


def size(count: float | None) -> str:
    """Bytes as `57.2 GB` (10^9)."""
    if count is None:
        return "-"
    for limit, unit in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= limit:
            return f"{count / limit:.3g} {unit}"
    return f"{count:.0f} B"


def energy(kwh: float | None) -> str:
    """`3.2 GWh`."""
    if kwh is None:
        return "-"
    for limit, unit in ((1e6, "GWh"), (1e3, "MWh"), (1, "kWh"), (1e-3, "Wh")):
        if kwh >= limit:
            return f"{kwh / limit:.3g} {unit}"
    return f"{kwh * 1e3:.3g} Wh"


def estimate_table(estimates: Estimates) -> Table:
    """A line per stage of training, and their sum."""
    rows = []
    for name, stage in estimates.stages.items():
        document = stage.to_json()
        need = document["memory_bytes"]["total"]
        held = f"{'[red]' if document['fits'] is False else ''}{size(need)}{'[/]' if document['fits'] is False else ''}"
        rows.append([escape(name), str(document["gpus"]), *_spent(document), held, size(document["checkpoint"]["bytes"])])
    totals = estimates.totals()
    rows.append(["all", "", *_spent(totals), size(totals["memory_bytes"]), f"{size(totals['peak_storage_bytes'])} stored"])
    headings = ("stage", "GPUs", "FLOPs", "time", "GPU-hours", "energy", "cost", "per GPU", "checkpoint")
    return table("what training takes", _caption(estimates), headings, rows, overflow="fold")


def _spent(document: dict[str, Any]) -> list[str]:
    hours, cost = document["gpu_hours"], document["cost"]
    numbers = [amount(hours) if hours is not None else "-", energy(document["energy_kwh"]), amount(cost) if cost is not None else "-"]
    return [amount(document["flops"]), duration(document["seconds"]), *numbers]


def _caption(estimates: Estimates) -> str:
    cluster = estimates.cluster
    if cluster is None:
        return "without a cluster: in the recipe there is no time, energy or cost"
    found = sorted({f"{part.mfu:.1%} {part.mfu_source}" for stage in estimates.stages.values() for part in stage.parts if part.mfu})
    mfu = f"MFU {', '.join(found)}" if found else "no MFU is stated (cluster.mfu), and none was measured"
    return (
        f"{cluster.nodes:,} node{'s' * (cluster.nodes > 1)} of {cluster.gpus_per_node} {cluster.gpu} ({size(cluster.device.memory)}); {mfu}"
    )


def memory_table(estimates: Estimates) -> Table:
    """Memory of a GPU at its peak, by part."""
    rows = []
    for name, stage in estimates.stages.items():
        memory = stage.largest.memory
        parts = [size(value) if (value := getattr(memory, part)) else "-" for part in MEMORY_PARTS]
        rows.append([escape(name), *parts, size(memory.total), memory.moment])
    headings = ("stage", *MEMORY_PARTS.values(), "total", "peak at")
    caption = "states: of the optimizer; kept: activations; gathered: weights and gradients on their way between GPUs"
    return table("memory of a GPU", caption, headings, rows, overflow="fold")


def checkpoint_table(estimates: Estimates) -> Table:
    """Checkpoints: sizes, intervals, storage and requests."""
    rows = []
    for name, stage in estimates.stages.items():
        saved = stage.to_json()["checkpoint"]
        requests = sum(saved["requests_each"].values())
        numbers = [size(saved["bytes"]), duration(saved["write_seconds"]), duration(saved["interval_seconds"])]
        numbers += [duration(saved["young_daly_seconds"]), f"{saved['written']:,}", size(saved["written_bytes"])]
        rows.append([escape(name), *numbers, f"{saved['kept']:,}", size(saved["kept_bytes"]), f"{requests:,}"])
    headings = ("stage", "each", "write", "every", "Young/Daly", "written", "in all", "kept", "stored", "requests")
    return table("checkpoints", "requests: to object storage, for each", headings, rows, overflow="fold")


def show_advice(console: Console, plan: Plan) -> None:
    """Advice behind the tables."""
    for advice in plan.advice.given:
        about = CODES[advice.code]
        console.print(f"[yellow]advice[/] [bold]{advice.code}[/] {escape(advice.stage)}: {escape(advice.message)}", soft_wrap=True)
        console.print(f"  {escape(about.reason)} ({escape(about.source)})", style="dim", soft_wrap=True)
    if plan.advice.silenced:
        names = ", ".join(f"{advice.code} ({advice.stage})" for advice in plan.advice.silenced)
        console.print(f"silenced: {escape(names)}", style="dim", soft_wrap=True)


def show_comparison(console: Console, comparison: Comparison, name: str, against: str) -> None:
    """Two plans side by side."""
    fields = [[escape(field), escape(_shown(before)), escape(_shown(now))] for field, (before, now) in comparison.fields.items()]
    if fields:
        console.print(table("fields that differ", "", ("field", escape(against), escape(name)), fields, overflow="fold"))
    else:
        console.print("no field differs")
    rows = []
    for total, (before, now) in comparison.totals.items():
        shown = TOTALS[total]
        pair = [shown(value) if value else "-" for value in (before, now)]
        change = f"{now / before - 1:+.1%}" if before and now is not None else "-"
        rows.append([total.replace("_", " ").removesuffix(" bytes").replace("energy kwh", "energy"), *pair, change])
    console.print(table("totals of training", "", ("", escape(against), escape(name), "difference"), rows, overflow="fold"))


def _shown(value: Any) -> str:
    return "not set" if value is None else str(value)
