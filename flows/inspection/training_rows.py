"""The rows that training has stored, as one table."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from flows.planning.plan import Plan
from infra.store.files.rows import decode


def training_rows(plan: Plan, stages: Collection[str]) -> list[dict[str, Any]]:
    """The rows of the parts of stages, in order; for an unfinished part, those up to its last checkpoint.
    Nested metrics have names with slashes: `validation/web`."""
    rows = []
    for node in plan.graph.nodes.values():
        if node.stage not in stages or node.end_step is None or plan.graph.duplicate_of(node) is not None:
            continue
        artifact = node.artifact(plan.store)
        steps = [step for step in artifact.checkpoint_steps() if step <= node.end_step]
        if not artifact.complete and not steps:
            continue
        marker = artifact.manifest if artifact.complete else artifact.checkpoint(steps[-1]).marker
        for entry in marker.history:
            data = artifact.store.reader(f"{node.path}/attempts/{entry.path}", entry).bytes()
            about = {
                "run": plan.pipeline.name,
                "stage": node.stage,
                "part": node.name,
                "attempt": entry.path.split("/")[0],
            }
            rows += [{**about, **_flat(row)} for row in decode(data, entry.path)]
    return rows


def _flat(row: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in row.items():
        flat |= _flat(value, f"{prefix}{name}/") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat
