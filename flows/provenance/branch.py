"""`apertus branch`: a small recipe that extends another and trains on from one of its checkpoints.

The new recipe has one more stage, named after the branch, which starts from the branch point and takes the
`rest of parent` for mixture, batch, schedule and budget (`specs.trajectory`): without a change, it does in
every step what the branched stage would have done. Optimizer, sequence length, precision, Goldfish and
packing are inherited; the new stage states the rest again. Stages that read the branched stage after the
point read the new one.

Invariants: a file is written when it has been composed, checked and planned, and never over another one. The
parts before the point keep their fingerprints, or nothing is written. The reference to the stored checkpoint
that the branch starts from is written before the file, so that pruning keeps the checkpoint.
"""

import os
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from flows.planning.graph import Node
from flows.planning.plan import Plan, make
from flows.provenance.branch_file import Draft, written
from infra.store import Store, StoreError
from infra.store.storage.local import write_once
from infra.store.writing.retention import hold, refer
from specs.base import Spec
from specs.compose import expand, extended
from specs.dependencies import CHECKPOINT, uses
from specs.differences import changes
from specs.errors import FieldPath, SpecError, a, did_you_mean
from specs.pipeline import Name, Pipeline
from specs.recipe import load, validate
from specs.schema import with_editor_line
from specs.settings import Phase
from specs.stages import STAGES
from specs.trajectory import Point, point_of
from specs.units import REST, Reference

FROM_PARENT = ("mixture", "global_batch_size", "schedule", "budget")  # `rest of parent`
# Fields that follow from the point, are inherited, or are about the branched stage alone; the others are
# stated again.
NOT_TAKEN = (
    *("kind", "from", "carry", "stop_at", "after", "protect", "silence", "description"),
    *(
        "optimizer",
        "sequence_length",
        "rope_theta",
        "precision",
        "goldfish",
        "z_loss",
        "packing",
        "model",
        "seed",
    ),
)


@dataclass
class Branch:
    path: Path
    text: str
    written: bool  # False where the file existed with the same content
    shared: list[str]  # parts that the original has as well
    stored: int  # how many of those are stored
    parts: list[str]  # the other parts
    notes: list[str]


def branch(
    spec: str,
    point: str,
    name: str,
    overrides: Iterable[str] = (),
    output: Path | None = None,
    store: str | None = None,
) -> Branch:
    """Writes the recipe `name`, which resumes from `point` (`pretrain@step=1200`) of `spec`.

    Raises:
        SpecError: the point does not exist or was not kept, an override changes what is before it, or the
            recipe cannot be planned. Each problem has its place, in the new file if the problem is there.
        StoreError: another file exists at the path of the branch.
    """
    overrides = list(overrides)
    try:
        TypeAdapter(Name).validate_python(name)
    except ValidationError:
        allowed = "letters, digits, '_', '.' and '-', at most 100, the first a letter or digit"
        raise SpecError.of((), f"{name!r} is no name of a stage", f"use {allowed}.", "--name") from None
    pipeline = load(spec)
    opened = Store.open(store or pipeline.store)
    plan = make(pipeline, opened)
    ref = _reference(pipeline, point, spec)
    if name in pipeline.stages:
        raise SpecError.of((), f"stage '{name}' already exists", "choose another name.", "--name")
    try:
        start = point_of(ref, plan.graph.trajectories, (), plan.graph.best)
    except SpecError as error:
        raise SpecError([replace(problem, where=point) for problem in error.problems]) from None
    _check_kept(plan, ref, start, point)
    path = output or Path(spec).parent / f"{name}.yaml"
    if path.resolve() == Path(spec).resolve():
        raise StoreError(f"'{path}' is the recipe to branch; choose another name, or --output")

    draft = Draft(
        pipeline, name, os.path.relpath(Path(spec).resolve(), path.resolve().parent), extended(spec).data
    )
    _fill(draft, plan, ref, start, overrides)
    options = [*(("--output", str(output)) if output else ()), *(x for o in overrides for x in ("--set", o))]
    command = " ".join(map(shlex.quote, ["apertus", "branch", spec, point, "--name", name, *options]))
    tokens = plan.graph.trajectories[start.phase].tokens_at(start.step)
    head = [
        f"A branch of {Path(spec).name} at step {start.step:,} of {start.phase} ({tokens:,} tokens):",
        "what comes before is shared, what comes after is trained again. Made by:",
        f"  {command}",
    ]
    text = with_editor_line(written(draft, head))
    branched = make(validate(expand(extended(path, text))), opened)
    _check_shared(plan, branched, start, name)
    existed = path.exists()
    other_file = f"'{path}' exists and is another file; choose another name, or --output, or remove it"
    if existed and path.read_bytes() != text.encode():
        raise StoreError(other_file)
    before = {node.path for node in plan.graph.nodes.values()}
    for node, parent, step in branched.graph.starts(branched.pipeline):  # so that pruning keeps checkpoints
        if node.path not in before and branched.steps[parent.name].stored:
            kept = step in parent.kept_steps(opened)
            (hold if kept else refer)(opened, parent.path, step, node.path)
    if not existed and not write_once(path, text.encode()):
        raise StoreError(other_file)
    shared = [node.name for node in branched.graph.nodes.values() if node.path in before]
    stored = sum(branched.steps[part].action == "reuse" for part in shared)
    new = [part for part in branched.graph.nodes if part not in shared]
    return Branch(path, text, not existed, shared, stored, new, draft.notes)


def _reference(pipeline: Pipeline, point: str, spec: str) -> Reference:
    try:
        ref = Reference.parse(point)
    except ValueError as error:
        raise SpecError.of((), str(error), where="STAGE@REF") from None
    stage = pipeline.stages.get(ref.stage)
    if stage is None:
        training = [name for name, other in pipeline.stages.items() if other.phases(name)]
        raise SpecError.of((), f"there is no stage '{ref.stage}'", did_you_mean(ref.stage, training), spec)
    parts = [phase.name for phase in stage.phases(ref.stage)]
    if not parts:
        message = f"'{ref.stage}' is {a(stage.kind)}, which has no training to continue"
        raise SpecError.of((), message, "branch a stage that trains.", spec)
    if ref.part is not None and ref.target not in parts:
        message = f"'{ref.stage}' has no part '{ref.part}'"
        raise SpecError.of((), message, did_you_mean(ref.target, parts), spec)
    return ref


def _check_kept(plan: Plan, ref: Reference, start: Point, point: str) -> None:
    """Raises SpecError for a step that a trajectory has passed without keeping it."""
    nodes = plan.graph.segments(start.phase)
    parent = plan.steps[nodes[start.segment].name]
    kept = [step for node in nodes for step in node.kept_steps(plan.store)]
    if (parent.action == "reuse" or (parent.resume_step or 0) > start.step) and start.step not in kept:
        steps = ", ".join(map(str, kept)) or "none"
        message = f"step {start.step} of '{ref.target}' was not kept; kept are {steps}"
        kept_too = "a step that a recipe starts from, or that is in checkpoint.milestones, is kept."
        raise SpecError.of((), message, f"branch at one of these; {kept_too}", point)


def _check_shared(plan: Plan, branched: Plan, start: Point, name: str) -> None:
    """Raises SpecError for the first part up to the branch point that is other work in the branch `name`."""
    before = {plan.graph.segments(start.phase)[start.segment].name}
    for part, node in reversed(plan.graph.nodes.items()):  # inputs come first in the graph
        if part in before:
            before.update(plan.graph.parents(node))
    for part, old in plan.graph.nodes.items():
        new = branched.graph.nodes.get(part) or _segment(branched, old)
        if part not in before or (new is not None and new.fingerprint == old.fingerprint):
            continue
        differing = changes(old.identity, (new or old).identity)
        fields = ", ".join(change.name for change in differing) or "what it reads"
        message = f"'{old.name}' would change ({fields}), and a branch shares everything before its point"
        fix = f"change it in stages.{name}, or write a recipe of its own."
        raise SpecError.of(("stages", old.stage), message, fix, "--set")


def _segment(branched: Plan, old: Node) -> Node | None:
    """The same segment under another name: a stage that ends earlier may have only one segment."""
    same = (node for node in branched.graph.segments(old.phase) if node.start_step == old.start_step)
    return next(same, None) if old.phase else None


# The new stage


def _fill(draft: Draft, plan: Plan, ref: Reference, start: Point, overrides: list[str]) -> None:
    """Adds the new stage, the references that move to it, the end of the old stage and the overrides."""
    pipeline, trajectory = plan.pipeline, plan.graph.trajectories[start.phase]
    stage = pipeline.stages[ref.stage]
    phases = stage.phases(ref.stage)
    index, phase = next((i, phase) for i, phase in enumerate(phases) if phase.name == start.phase)
    point = f"{ref.target if ref.part or len(phases) == 1 else start.phase}@step={start.step}"
    data = pipeline._document.data["stages"][ref.stage] if pipeline._document else {}
    new: dict[str, Any] = {"kind": stage.CONTINUED_BY or stage.kind, "from": point}
    known = STAGES[stage.CONTINUED_BY] if stage.CONTINUED_BY else type(phase.training)
    if phase.path[2:]:  # one of the `steps` of its stage
        step = {"sequence_length": trajectory.settings.sequence_length, "rope_theta": phase.rope_theta}
        step |= _continuation(phase, known, data["steps"][index], draft)
        following = [
            {key: value for key, value in step.items() if value is not None}
            for step in data["steps"][index + 1 :]
        ]
        new["steps"] = [step, *following]
    else:
        new |= _continuation(phase, known, data, draft)
    draft.add(("stages", draft.name), new, f"continues {start.phase} from step {start.step:,}")
    left = _repoint(draft, plan, ref, start)
    if left:
        those = f"{', '.join(left)} read {ref.stage} as before"
        fix = f"add stages that read {draft.name}"
        draft.notes.append(f"{those}: a matrix states that for all of its variants; {fix}")
    segments = plan.graph.segments(start.phase)[start.segment :]
    if start.step < trajectory.steps and any(plan.steps[node.name].action != "reuse" for node in segments):
        path = ("stages", ref.stage, "stop_at")
        if "stop_at" in type(stage).model_fields and not left and draft.matrix_of(path) is None:
            draft.add(path, f"{start.step} steps", f"not trained to its end, step {trajectory.steps:,}")
        else:
            draft.notes.append(f"{ref.stage} itself trains on to its end")
    for override in overrides:
        draft.override(override)


def _continuation(phase: Phase, of: type[Spec], data: dict[str, Any], draft: Draft) -> dict[str, Any]:
    """The fields of the stage, or of the step of a `long_context` stage, that continues a phase. `of`: its
    class; `data`: what the recipe states for the phase."""
    known = of.model_fields
    carry = ["weights", "optimizer", "data"]
    if phase.training.adapters:
        carry = ["weights", "data"]
        adapter = "an adapter is added to the weights and a new one begins"
        draft.notes.append(f"{adapter}, so the optimizer's states begin at zero")
    usual = known["carry"].get_default(call_default_factory=True)
    fields: dict[str, Any] = {"carry": carry} if carry != usual else {}
    fields |= {name: REST for name in FROM_PARENT if name in known}
    left_out = (*NOT_TAKEN, *fields)
    copied = {name: value for name, value in data.items() if value is not None and name not in left_out}
    if isinstance(saving := copied.get("checkpoint"), dict):
        copied["checkpoint"] = {name: value for name, value in saving.items() if name != "milestones"}
    return fields | copied


# References that move to the new stage


def _repoint(draft: Draft, plan: Plan, ref: Reference, start: Point) -> list[str]:
    """Makes stages that read the stage after the point read the new one; returns those that no file can."""
    pipeline, trajectories = plan.pipeline, plan.graph.trajectories
    phases = [phase.name for phase in pipeline.stages[ref.stage].phases(ref.stage)]
    following = set(phases[phases.index(start.phase) :])
    left: dict[str, None] = {}

    def state(path: FieldPath, value: Any, comment: str) -> None:
        if draft.differs(path):
            left[str(path[1])] = None
        else:
            draft.add(path, value, comment)

    for name, stage in pipeline.stages.items():
        for path, other, results in uses(name, stage):
            if other.stage != ref.stage or CHECKPOINT not in results:
                continue
            there = point_of(other, trajectories, path, plan.graph.best)
            last = not other.selector or other.best is not None
            before = there.phase == start.phase and there.step <= start.step and not last
            if there.phase in following and not before:
                moved = _moved(draft.name, other, there, start, phases, trajectories)
                state(path, str(moved), f"was {other}")
        if ref.stage in stage.after:
            after = [draft.name if name == ref.stage else name for name in stage.after]
            state(("stages", name, "after"), after, f"was {ref.stage}")
        if ref.stage in stage.excluded_stages:
            state(("stages", name, "exclude"), [*stage.excluded_stages, draft.name], "")
    return list(left)


def _moved(
    name: str, other: Reference, there: Point, start: Point, phases: list[str], trajectories: Any
) -> Reference:
    """A reference to the same place in the new stage."""
    part = str(phases.index(there.phase) - phases.index(start.phase) + 1) if other.part is not None else None
    moved = replace(other, stage=name, part=part)
    if there.phase != start.phase:
        return moved
    done = trajectories[start.phase].tokens_at(start.step)
    step = other.step - start.step if other.step is not None else None
    return replace(moved, step=step, tokens=other.tokens - done if other.tokens is not None else None)
