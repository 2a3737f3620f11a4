"""Plans what a run would do with each part, and why: *reuse*, *resume at step N* or *run*.

Invariants: `make` is a pure function of recipe, store and listing; it writes nothing and imports neither
torch nor Prefect. The state of a part depends on its fingerprint alone, so nothing is rerun because of a
name, a place or the number of processes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Literal

from flows.planning import declared_inputs
from flows.planning.advice import Given, advise
from flows.planning.estimate import Estimates, estimate
from flows.planning.estimate.training import extent
from flows.planning.graph import Graph, Input, Node
from flows.planning.parts import build
from flows.planning.rerun_reason import difference
from flows.planning.run_records import Records
from flows.planning.source_usage import SourceUsage, usages
from flows.planning.source_usage import problems as usage_problems
from infra.store import Store
from infra.store.documents import Manifest
from infra.store.inputs import Listing
from infra.store.writing.lease import holder_of
from specs.dependencies import checkpoints, order
from specs.errors import FieldPath, Problem, SpecError, counted, did_you_mean, some_of
from specs.pipeline import Pipeline
from specs.stages.gates import Gated
from specs.stages.training import Segment
from specs.trajectory import phase_of, point_of

Action = Literal["reuse", "resume", "run"]


@dataclass(frozen=True)
class Step:
    """The action that a plan takes for one part, and its reason."""

    node: Node
    action: Action
    reason: str
    stored: bool
    resume_step: int | None = None  # the last usable checkpoint of its own trajectory
    gate_failures: tuple[str, ...] = ()
    # inputs that the part depends on: it cannot run, and its fingerprint is provisional
    unavailable: tuple[str, ...] = ()
    holder: str = ""  # who seems to be working on it now
    asked_flops: int = 0  # of sampling and scoring, where they are counted

    @property
    def state(self) -> str:
        """The action, or a state that matters more: `gate failed` or `declared`."""
        return "gate failed" if self.gate_failures else "declared" if self.unavailable else self.action

    @property
    def flops(self) -> int:
        return self.node.flops + self.asked_flops

    @property
    def left(self) -> dict[str, int]:
        """The tokens, steps and FLOPs still to be done; steps up to `resume_step` are not repeated."""
        node, share = self.node, Fraction(0 if self.action == "reuse" else 1)
        if self.resume_step is not None and node.end_step is not None and node.steps:
            share = Fraction(node.end_step - self.resume_step, node.steps)
        return {
            "tokens": int(node.tokens * share),
            "steps": int(node.steps * share),
            "flops": int(self.flops * share),
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.node.name,
            "kind": self.node.kind,
            "action": self.action,
            "state": self.state,
            "reason": self.reason,
            "fingerprint": self.node.fingerprint,
            "path": self.node.path if self.stored else None,
            "tokens": self.node.tokens,
            "steps": self.node.steps,
            "flops": self.flops,
            **extent(self.node),
            "resume_step": self.resume_step,
            "gate_failures": list(self.gate_failures),
            "declared": list(self.unavailable),
            "holder": self.holder,
        }


@dataclass
class Plan:
    """The steps of a run by part, inputs first. `source_usage`: the use of the sources by training;
    `estimates`: those of work, time, memory and cost."""

    pipeline: Pipeline
    store: Store
    graph: Graph
    steps: dict[str, Step] = field(default_factory=dict)
    source_usage: list[SourceUsage] = field(default_factory=list)
    estimates: Estimates = field(default_factory=Estimates)
    advice: Given = field(default_factory=Given)

    @property
    def parts(self) -> int:
        """The number of parts, without duplicates."""
        return len(self.steps.keys() - self.graph.duplicates.keys())

    @property
    def pending(self) -> list[Step]:
        """The unfinished steps: parts to run or resume, and finished parts whose gates are not met."""
        return [step for step in self.steps.values() if step.action != "reuse" or step.gate_failures]

    def named(self, name: str, where: str) -> list[Node]:
        """The part with this name, or all parts of the stage with it. SpecError at `where` for neither."""
        nodes = self.graph.nodes
        if parts := [nodes[name]] if name in nodes else self.graph.of(name):
            return parts
        fix = did_you_mean(name, [*self.pipeline.stages, *nodes])
        raise SpecError.of((), f"there is no stage '{name}'", fix, where)

    def totals(self) -> dict[str, Any]:
        """The totals of all work and of the work to do; work that two stages share is counted once."""
        duplicates = self.graph.duplicates
        once = [self.steps[name] for name in self.graph.nodes if name not in duplicates]
        todo = [step for step in once if step.action != "reuse"]
        left = {key: sum(step.left[key] for step in todo) for key in ("tokens", "steps", "flops")}
        trajectories = list(self.graph.trajectories.values())
        # of an imported model, perhaps only the tokenizer is read
        own = [t for t in trajectories if t.origin != "import"] or trajectories
        return {
            "tokens": sum(step.node.tokens for step in once),
            "steps": sum(step.node.steps for step in once),
            "flops": sum(step.flops for step in once),
            "to_do": left | {"parts": len(todo)},
            "parameters": max((t.model.parameters for t in own), default=0),
        }

    def to_json(self, masked_by_hash: Callable[[Segment, int], int] | None = None) -> dict[str, Any]:
        """The JSON form: one object per stage of the recipe, inputs first, with its parts inside, and the
        totals of all work and of the work still to be done. `masked_by_hash`: see `Estimates.to_json`."""
        stages = []
        for name in order(self.pipeline):
            parts = [self.steps[node.name].to_json() for node in self.graph.of(name)]
            stages.append(_whole(name, self.pipeline.stages[name].kind, parts))
        return {
            "pipeline": self.pipeline.name,
            "store": self.store.url,
            "stages": stages,
            "totals": self.totals(),
            "notes": self.graph.notes,
            "tasks": self.graph.tasks,
            "declared": {name: files.to_json() for name, files in self.graph.unavailable.items()},
            "source_usage": [usage.to_json() for usage in self.source_usage],
            "estimates": self.estimates.to_json(masked_by_hash),
            **self.advice.to_json(),
        }


def _whole(name: str, kind: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
    """A stage as the sum of its parts; fingerprint and path are those of the last part, which is the one that
    other stages read of a chain."""
    actions = [part["action"] for part in parts]
    action = "reuse" if set(actions) == {"reuse"} else ("run" if set(actions) == {"run"} else "resume")
    states = {part["state"] for part in parts} - {"reuse", "run", "resume"}
    decisive = next((part for part in parts if part["action"] != "reuse"), parts[-1])
    named = "" if len(parts) == 1 or action == "reuse" else f"{decisive['name']}: "
    return {
        "name": name,
        "kind": kind,
        "action": action,
        "state": next((state for state in ("gate failed", "declared") if state in states), action),
        "reason": named + decisive["reason"],
        "fingerprint": parts[-1]["fingerprint"],
        "path": parts[-1]["path"],
        **{key: sum(part[key] for part in parts) for key in ("tokens", "steps", "flops")},
        "gate_failures": [failure for part in parts for failure in part["gate_failures"]],
        "declared": list(dict.fromkeys(name for part in parts for name in part["declared"])),
        "parts": parts,
    }


def make(
    pipeline: Pipeline,
    store: Store,
    on_read: Callable[[str, Listing], None] = lambda name, listing: None,
    *,
    ask_network: bool = True,
) -> Plan:
    """Plans a checked pipeline. Without `ask_network`, declared remote inputs count as unavailable. SpecError
    if the pipeline cannot be run: a source that is missing and not declared, too little data, a parent that
    was not kept, a protected stage that would be rerun."""
    try:
        plan = Plan(pipeline, store, build(pipeline, store, on_read, ask_network))
    except SpecError as error:
        raise pipeline.located(error) from None
    records = Records(store, pipeline.name)
    waiting = plan.graph.waits_for()
    for node in plan.graph.nodes.values():
        if missing := waiting[node.name]:
            reason = declared_inputs.reason(plan.graph, node)
            plan.steps[node.name] = Step(node, "run", reason, False, unavailable=missing)
            continue
        step = decide(node, plan, records)
        if step.stored and step.action != "reuse" and (held := holder_of(store, node.path)) is not None:
            step = replace(step, holder=str(held), reason=f"held by {held}")
        plan.steps[node.name] = step
    plan.graph.notes += [*declared_inputs.notes(plan.graph, store), *_packing_notes(plan)]
    plan.source_usage = usages(plan.graph, pipeline, store)
    problems = [*usage_problems(plan.source_usage), *_lost_parents(plan), *_protected(plan, records)]
    if problems:
        raise pipeline.located(SpecError(problems))
    plan.estimates = estimate(plan.graph, pipeline, store)
    for part in plan.estimates.asking:
        name = part.node.name
        plan.steps[name] = replace(plan.steps[name], asked_flops=part.flops)
    plan.advice = advise(plan.graph, pipeline, plan.source_usage, plan.estimates)
    plan.graph.notes += plan.advice.notes
    if records.problem:
        plan.graph.notes.append(f"what changed since the last run is not known: {records.problem}")
    if store.without_checksum:
        documents = some_of(sorted(store.without_checksum))
        unnoticed = "stored without a checksum, so that a change would not be noticed"
        plan.graph.notes.append(f"{unnoticed}: {documents}")
    return plan


def decide(node: Node, plan: Plan, records: Records | None = None) -> Step:
    """Decides on the action for one part, by its state in the store. StoreError when the part is finished and
    its manifest is damaged: it would neither be right to reuse it, nor to make it again unasked."""
    store = plan.store
    if (manifest := node.artifact(store).manifest_if_complete()) is not None:
        failures = _failed_gates(plan.pipeline, node, manifest)
        return Step(node, "reuse", failures[0] if failures else "finished", True, gate_failures=failures)
    if node.end_step is not None and (usable := node.kept_steps(store)):
        ended = [step for step in node.artifact(store).manifest_steps() if step <= node.end_step]
        grew = usable[-1] in ended
        why = f"the budget grew: it ended at step {max(ended)} before" if grew else "it was interrupted"
        reason = f"at step {usable[-1]} of {node.end_step}; {why}"
        return Step(node, "resume", reason, True, resume_step=usable[-1])
    stored = bool(store.names(node.path))
    if records is None:
        return Step(node, "run", "", stored)
    if (duplicate := plan.graph.duplicates.get(node.name)) is not None:
        return Step(node, "run", f"done once, as {duplicate}", stored)
    if stored:
        reason = "it was interrupted before anything was committed"
        if units := len(store.names(f"{node.path}/units")):
            reason = f"it was interrupted; {counted(units, 'unit of work is', 'units of work are')} stored"
        elif any(store.names(f"damaged/{when}/{node.path}") for when in store.names("damaged")):
            reason = "it was damaged, and is withdrawn"
        return Step(node, "run", reason, stored)
    return Step(node, "run", difference(node, records), False)


def _failed_gates(pipeline: Pipeline, node: Node, manifest: Manifest) -> tuple[str, ...]:
    stage = pipeline.stages[node.stage]
    if not isinstance(stage, Gated) or node.kind != stage.kind or not stage.gates:
        return ()
    stored = manifest.metrics.items()
    metrics = {name: value for name, value in stored if isinstance(value, (int, float))}
    return tuple(
        f"{failure} ({pipeline.where(('stages', node.stage, 'gates', index))})".removesuffix(" ()")
        for index, gate in enumerate(stage.gates)
        if (failure := gate.failure(metrics)) is not None
    )


def _packing_notes(plan: Plan) -> list[str]:
    """One note on the result of each finished best-fit packing."""
    notes = []
    for step in plan.steps.values():
        node = step.node
        if node.kind == "packing" and step.action == "reuse" and node.name not in plan.graph.duplicates:
            artifact = node.artifact(plan.store)
            names = ("padding", "cropped", "cropped_by_windows")
            padding, cropped, windows = (artifact.metric(f"share/{name}") for name in names)
            notes.append(
                f"{node.name}: {artifact.metric('rows'):,} rows with {padding:.2%} padding; {cropped:.1%} of"
                f" the tokens are in documents that are cut, {windows:.1%} would be if they were concatenated"
            )
    return notes


# Problems that are found before anything starts


def _lost_parents(plan: Plan) -> list[Problem]:
    """A problem for each stage that starts from a step that is not stored and will not be: the trajectory has
    finished, or passed the step, without keeping it."""
    problems = []
    for step in plan.steps.values():
        for input_ in step.node.inputs.values():
            if step.action == "reuse" or input_.step is None or input_.node is None:
                continue
            parent = plan.steps[input_.node]
            if parent.node.kind == "select":
                continue  # it has chosen while this plan was made: the next plan reads what it chose
            past = parent.action == "reuse" or (parent.resume_step or 0) > input_.step
            if not past or input_.step in parent.node.kept_steps(plan.store):
                continue
            phase = plan.graph.segments(parent.node.phase) or [parent.node]
            kept = ", ".join(str(at) for node in phase for at in node.kept_steps(plan.store)) or "none"
            message = f"step {input_.step} of '{input_.node}' was not kept; kept are {kept}"
            fix = "start from one of these, or rerun the parent."
            problems.append(Problem(_where_named(plan, step.node, input_), message, fix))
    return list(dict.fromkeys(problems))


def _where_named(plan: Plan, node: Node, input_: Input) -> FieldPath:
    """The path at which the recipe names a checkpoint that a part reads."""
    for path, ref in checkpoints(node.stage, plan.pipeline.stages[node.stage]):
        if phase_of(ref, plan.graph.trajectories) not in plan.graph.trajectories:
            continue  # the folder of a model of another architecture
        start = point_of(ref, plan.graph.trajectories, path, plan.graph.best)
        if start.step == input_.step and plan.graph.segments(start.phase)[start.segment].name == input_.node:
            return path
    return ("stages", node.stage, "from")


def _protected(plan: Plan, records: Records) -> list[Problem]:
    """A problem for each protected stage with a part that had finished and would not be reused, because the
    part or its inputs changed, because it would continue to another end, or because it is gone from the
    store."""
    problems: dict[str, Problem] = {}  # the first of each stage: later ones follow from it
    for step in plan.steps.values():
        node = step.node
        protected = plan.pipeline.stages[node.stage].protect and node.stage not in problems
        if step.action == "reuse" or step.unavailable or not protected:
            continue
        before, path = records.last(node.name), ("stages", node.stage, "protect")
        if records.had_finished(node.path, node.end_step):
            message = (
                f"'{node.name}' is protected and had finished; {node.path} is no longer complete in the store"
            )
            fix = "bring it back from a copy (apertus cp), or remove protect: true to have it made again."
            problems[node.stage] = Problem(path, message, fix)
        elif before is not None and (before.complete or records.had_finished(before.path, before.step)):
            ends = f"it ended at step {before.step} and would now end at step {node.end_step}"
            why = step.reason if before.path != node.path else ends
            message = f"'{node.name}' is protected and would run again: {why}"
            problems[node.stage] = Problem(path, message, "undo the change, or remove protect: true.")
        elif records.problem:
            message = f"'{node.name}' is protected, and it is not known whether it had finished"
            fix = "mend the store as it says, or remove protect: true."
            problems[node.stage] = Problem(path, f"{message}: {records.problem}", fix)
    return list(problems.values())
