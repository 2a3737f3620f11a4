"""What a branch plans."""

from flows.planning.plan import Plan, make
from flows.provenance.branch import Branch
from infra.store import Store
from specs.recipe import load
from specs.stages.training import Segment


def plan_of(made: Branch, store: Store) -> Plan:
    return make(load(made.path), store)


def segment(plan: Plan, name: str) -> Segment:
    part = plan.graph.nodes[name].part
    assert isinstance(part, Segment)
    return part
