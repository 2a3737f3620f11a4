"""What of a plan differs from another plan, and its segments."""

from __future__ import annotations

from flows.planning.plan import Plan
from specs.stages.training import Segment


def fingerprints(plan: Plan) -> dict[str, str]:
    return {name: node.fingerprint for name, node in plan.graph.nodes.items()}


def changed(before: Plan, after: Plan) -> set[str]:
    old, new = fingerprints(before), fingerprints(after)
    return {name for name in old if old[name] != new.get(name)}


def segment(plan: Plan, name: str) -> Segment:
    part = plan.graph.nodes[name].part
    assert isinstance(part, Segment)
    return part
