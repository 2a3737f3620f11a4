"""What a run would do, and why: for each part *reuse*, *resume at step N* or *run*.

Invariants: `make` is a pure function of recipe, store and listing; it writes nothing and imports neither torch nor Prefect. The
state of a part depends on its fingerprint alone, so nothing is rerun because of a name, a place or the number of processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from flows import supply
from flows.advice import Given, advise
from flows.estimate import Estimates, estimate
from flows.graph import Graph, Node
from flows.nearest import Records, difference
from flows.parts import build
from infra.store import Artifact, Store
from infra.store.inputs import Listing
from specs.errors import Problem, SpecError
from specs.pipeline import Pipeline
from specs.stages.evaluate import EvaluateStage

Action = Literal["reuse", "resume", "run"]


@dataclass(frozen=True)
class Step:
    """What is to be done about one part. `resume_step` is the last usable checkpoint of its own trajectory."""

    node: Node
    action: Action
    reason: str
    stored: bool
    resume_step: int | None = None
    gate_failures: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.node.name,
            "kind": self.node.kind,
            "action": self.action,
            "reason": self.reason,
            "fingerprint": self.node.fingerprint,
            "path": self.node.path if self.stored else None,
            "tokens": self.node.tokens,
            "steps": self.node.steps,
            "flops": self.node.flops,
            "resume_step": self.resume_step,
            "gate_failures": list(self.gate_failures),
        }


@dataclass
class Plan:
    """Steps by part, inputs first; `demands`: what training asks of the sources; `estimates`: what it takes."""

    pipeline: Pipeline
    store: Store
    graph: Graph
    steps: dict[str, Step] = field(default_factory=dict)
    demands: list[supply.Demand] = field(default_factory=list)
    estimates: Estimates = field(default_factory=Estimates)
    advice: Given = field(default_factory=Given)

    @property
    def pending(self) -> list[Step]:
        """What is not finished: parts to run or resume, and finished ones whose gates are not met."""
        return [step for step in self.steps.values() if step.action != "reuse" or step.gate_failures]

    def to_json(self) -> dict[str, Any]:
        """One object per stage of the recipe, its parts inside, and totals of what there is and what is still to be done."""
        stages = []
        for name, stage in self.pipeline.stages.items():
            parts = [self.steps[node.name].to_json() for node in self.graph.of(name)]
            stages.append(_whole(name, stage.kind, parts))
        once = [self.steps[node.name].to_json() for node in self.graph.nodes.values() if self.graph.twin(node) is None]
        todo = [part for part in once if part["action"] != "reuse"]
        totals: dict[str, Any] = {key: sum(part[key] for part in once) for key in ("tokens", "steps", "flops")}
        totals["to_do"] = {key: sum(part[key] for part in todo) for key in ("tokens", "steps", "flops")} | {"parts": len(todo)}
        totals["parameters"] = max((t.model.parameters for t in self.graph.trajectories.values()), default=0)
        document: dict[str, Any] = {
            "pipeline": self.pipeline.name,
            "store": self.store.url,
            "stages": stages,
            "totals": totals,
            "notes": self.graph.notes,
        }
        document["supply"] = [demand.to_json() for demand in self.demands]
        return document | {"estimates": self.estimates.to_json()} | self.advice.to_json()


def _whole(name: str, kind: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
    """A stage as the sum of its parts; fingerprint and path are those of the last, which is what other stages read of a chain."""
    actions = [part["action"] for part in parts]
    action = "reuse" if set(actions) == {"reuse"} else ("run" if set(actions) == {"run"} else "resume")
    decisive = next((part for part in parts if part["action"] != "reuse"), parts[-1])
    reason = decisive["reason"] if len(parts) == 1 or action == "reuse" else f"{decisive['name']}: {decisive['reason']}"
    return {
        "name": name,
        "kind": kind,
        "action": action,
        "reason": reason,
        "fingerprint": parts[-1]["fingerprint"],
        "path": parts[-1]["path"],
        **{key: sum(part[key] for part in parts) for key in ("tokens", "steps", "flops")},
        "gate_failures": [failure for part in parts for failure in part["gate_failures"]],
        "parts": parts,
    }


def make(pipeline: Pipeline, store: Store, on_read: Callable[[str, Listing], None] = lambda name, listing: None) -> Plan:
    """Plans a checked pipeline. SpecError when it cannot be run: a source that is missing, data that do not suffice, a parent that was not
    kept, a protected stage that would be rerun."""
    try:
        plan = Plan(pipeline, store, build(pipeline, store, on_read))
    except SpecError as error:
        raise pipeline.located(error) from None
    records = Records(store, pipeline.name)
    for node in plan.graph.nodes.values():
        plan.steps[node.name] = decide(node, plan, records)
    plan.graph.notes += _packing_notes(plan)
    plan.demands = supply.demands(plan.graph, pipeline, store)
    problems = [*supply.problems(plan.demands), *_lost_parents(plan), *_protected(plan, records)]
    if problems:
        raise pipeline.located(SpecError(problems))
    plan.estimates = estimate(plan.graph, pipeline, store)
    plan.advice = advise(plan.graph, pipeline, plan.demands, plan.estimates)
    plan.graph.notes += plan.advice.notes
    return plan


def decide(node: Node, plan: Plan, records: Records | None = None) -> Step:
    """The state of one part in the store."""
    store = plan.store
    if Artifact(store, node.path, node.end_step).complete:
        failures = _failed_gates(plan.pipeline, node, store)
        return Step(node, "reuse", failures[0] if failures else "finished", True, gate_failures=failures)
    if node.end_step is not None:
        artifact = Artifact(store, node.path)
        usable = [step for step in artifact.checkpoint_steps() if (node.start_step or 0) < step <= node.end_step]
        if usable:
            ended = [step for step in artifact.manifest_steps() if step <= node.end_step]
            why = f"the budget grew: it ended at step {max(ended)} before" if usable[-1] in ended else "it was interrupted"
            return Step(node, "resume", f"at step {usable[-1]} of {node.end_step}; {why}", True, resume_step=usable[-1])
    stored = bool(store.names(node.path))
    if records is None:
        return Step(node, "run", "", stored)
    if (twin := plan.graph.twin(node)) is not None:
        return Step(node, "run", f"done once, as {twin}", stored)
    if stored:
        units = len(store.names(f"{node.path}/units"))
        reason = f"it was interrupted; {units} units of work are stored" if units else "it was interrupted before anything was committed"
        return Step(node, "run", reason, stored)
    return Step(node, "run", difference(node, plan.graph, records), False)


def _failed_gates(pipeline: Pipeline, node: Node, store: Store) -> tuple[str, ...]:
    stage = pipeline.stages[node.stage]
    if not isinstance(stage, EvaluateStage) or node.kind != stage.kind or not stage.gates:
        return ()
    metrics = Artifact(store, node.path).manifest["metrics"]
    return tuple(failure for gate in stage.gates if (failure := gate.failure(metrics)) is not None)


def _packing_notes(plan: Plan) -> list[str]:
    """What best-fit packing came to, where it is done."""
    notes = []
    for step in plan.steps.values():
        node = step.node
        if node.kind == "packing" and step.action == "reuse" and plan.graph.twin(node) is None:
            metrics = Artifact(plan.store, node.path).manifest["metrics"]
            padding, cropped, windows = (metrics[f"share/{name}"] for name in ("padding", "cropped", "cropped_by_windows"))
            notes.append(
                f"{node.name}: {metrics['rows']:,} rows with {padding:.2%} padding; {cropped:.1%} of the tokens are in documents that are "
                f"cut, {windows:.1%} would be if they were concatenated"
            )
    return notes


# What is refused before anything starts


def _lost_parents(plan: Plan) -> list[Problem]:
    """Stages that start from a step which a finished parent did not keep."""
    problems = []
    for step in plan.steps.values():
        for read in step.node.inputs.values():
            if step.action == "reuse" or read.step is None or read.node is None or plan.steps[read.node].action != "reuse":
                continue
            kept = Artifact(plan.store, plan.graph.nodes[read.node].path).checkpoint_steps()
            if read.step not in kept:
                message = f"step {read.step} of '{read.node}' was not kept; kept are {', '.join(map(str, kept)) or 'none'}"
                problems.append(Problem(("stages", step.node.stage, "from"), message, "start from one of these, or rerun the parent."))
    return problems


def _protected(plan: Plan, records: Records) -> list[Problem]:
    problems = []
    for step in plan.steps.values():
        if step.action == "reuse" or not plan.pipeline.stages[step.node.stage].protect:
            continue
        before = records.last(step.node.name)
        if before is not None and before.path != step.node.path and before.complete:
            message = f"is protected and would run again: {step.reason}"
            problems.append(Problem(("stages", step.node.stage, "protect"), message, "undo the change, or remove protect: true."))
    return problems
