"""Compares two plans: the differing fields of their recipes, and their totals.

Invariant: recipes are compared as they are read (composed, defaults filled in), so that two spellings of one
recipe do not differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from flows.format import amount, duration, energy, flop, size
from specs.base import flatten
from specs.differences import changes
from specs.pipeline import Pipeline

if TYPE_CHECKING:
    from flows.planning.plan import Plan

TOTALS: dict[str, tuple[str, Callable[[Any], str]]] = {  # label and format, by key of `Estimates.totals`
    "parameters": ("parameters", amount),
    "tokens": ("tokens of training", amount),
    "steps": ("steps", lambda value: f"{value:,}"),
    "sampled_tokens": ("tokens sampled", amount),
    "read_tokens": ("tokens read", amount),
    "flops": ("FLOPs", flop),
    "gpu_hours": ("GPU-hours", amount),
    "core_hours": ("core-hours of data", amount),
    "seconds": ("time", duration),
    "energy_kwh": ("energy", energy),
    "cost": ("cost", amount),
    "memory_bytes": ("memory of a GPU", size),
    "peak_storage_bytes": ("most that is stored", size),
}
NAMES = ("name", "description", "store")


class PlanComparison(NamedTuple):
    """The differences between two plans. fields: by path, the values in the other recipe and in this one,
    None where a value is missing; totals: by name, the values in the other plan and in this one, None where a
    total is unknown (`Estimates.totals`); by_stage: the fields again, by stage, with "" for fields of no
    stage; variants of a stage that differ in the same way are merged under the name of the stage."""

    fields: dict[str, tuple[Any, Any]]
    totals: dict[str, tuple[float | None, float | None]]
    by_stage: dict[str, dict[str, tuple[Any, Any]]]

    def to_json(self) -> dict[str, Any]:
        totals = {}
        for name, (before, now) in self.totals.items():
            difference = None if before is None or now is None else now - before
            totals[name] = {"against": before, "this": now, "difference": difference}
        fields = {name: {"against": before, "this": now} for name, (before, now) in self.fields.items()}
        return {"fields": fields, "totals": totals}


def compare(plan: Plan, other: Plan) -> PlanComparison:
    common = {
        "stages": plan.pipeline.stages.keys() & other.pipeline.stages.keys(),
        "sources": plan.pipeline.sources.keys() & other.pipeline.sources.keys(),
    }
    fields = {
        change.name: (change.b, change.a)
        for change in changes(_fields(plan.pipeline, common), _fields(other.pipeline, common))
    }
    totals, others = plan.estimates.totals(), other.estimates.totals()
    return PlanComparison(
        fields, {name: (others[name], totals[name]) for name in TOTALS}, _by_stage(fields, plan.pipeline)
    )


def _by_stage(
    fields: dict[str, tuple[Any, Any]], pipeline: Pipeline
) -> dict[str, dict[str, tuple[Any, Any]]]:
    """The differing fields by stage and by path in the stage; fields in which variants of a stage differ in
    the same way appear once, under the name of the stage."""
    stages = sorted(pipeline.stages, key=len, reverse=True)
    alike: dict[tuple[str, str], list[tuple[str, tuple[Any, Any]]]] = {}
    for path, pair in fields.items():
        stage = next((stage for stage in stages if path.startswith(f"stages.{stage}.")), "")
        rest = path.removeprefix(f"stages.{stage}.") if stage else path
        alike.setdefault((pipeline.family(stage) if stage else "", rest), []).append((stage, pair))
    differences: dict[str, dict[str, tuple[Any, Any]]] = {}
    for (family, rest), members in alike.items():
        same = len(members) > 1 and len({repr(pair) for _, pair in members}) == 1
        for stage, pair in [(family, members[0][1])] if same else members:
            differences.setdefault(stage, {})[rest] = pair
    return differences


def _fields(pipeline: Pipeline, common: dict[str, set[str]]) -> dict[str, Any]:
    """The values by path; a stage or source that only one of the recipes has is a single value."""
    document = pipeline.model_dump(mode="json", by_alias=True, exclude=set(NAMES))
    for group in ("stages", "sources"):
        document[group] = {
            name: value if name in common[group] else value.get("kind", "declared")
            for name, value in document[group].items()
        }
    return {name: value for name, value in flatten(document).items() if value is not None}
