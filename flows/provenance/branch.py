"""`apertus branch`: a small recipe that extends another and trains on from one of its checkpoints.

The new recipe has one more stage, of the name of the branch, which begins `from` the branch point with the settings that the stage had
there, for what was left of it; what read the end of the old stage reads that of the new one. So everything before the point is shared, by
fingerprint, and everything behind it is trained anew, with whatever `--set` changes.

What is piecewise (mixture, batch) resumes from the piece at the point, borders moved by what was consumed. Of the schedule, the rest of the
warm-up and a decay that lies behind the point stay as they are; inside a linear decay the same line goes on; inside one of another shape it
begins anew from the rate at the point, which the file says. Optimizer, sequence length, precision, Goldfish and packing are inherited.

Invariants: a file is written when it has been composed, checked and planned, and never over another one. What lies before the point has the
fingerprints that it has in the original recipe, or nothing is written. A stored checkpoint that the branch starts from is referred to
before the file is there, so that pruning leaves it.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flows.planning.graph import Node
from flows.planning.plan import Plan, kept_steps, make
from flows.provenance.branch_file import Draft, written
from infra.store import Store, StoreError
from infra.store.retention import hold, refer
from specs.compose import expand, extended
from specs.dependencies import CHECKPOINT, uses
from specs.differences import changes
from specs.errors import FieldPath, Problem, SpecError, a, did_you_mean
from specs.piecewise import batch_pieces, mixture_pieces
from specs.pipeline import Pipeline
from specs.recipe import load, validate
from specs.stages.long_context import LongContextStage
from specs.stages.mixture import MixtureStage
from specs.stages.training import MixtureTraining, Phase, Training, TrainingStage
from specs.trajectory import Point, SegmentPlan, Trajectory, point_of
from specs.units import Budget, Reference

TAKEN = (  # what is stated again, where the branched stage states it; all else is inherited or follows from the point
    *("conversations", "preferences", "prompt_weight", "longer", "lora", "launch"),
    *("micro_batch_size", "attention", "activation_checkpointing", "compile", "checkpoint", "validation"),
)


@dataclass
class Made:
    """A branch. `written`: False where the file stood there with the same content; `shared`: parts of the original; `stored`: of those."""

    path: Path
    text: str
    written: bool
    shared: list[str] = field(default_factory=list)
    stored: int = 0
    new: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def branch(spec: str, point: str, name: str, overrides: Iterable[str] = (), output: Path | None = None, store: str | None = None) -> Made:
    """Writes the recipe `name`, which resumes from `point` (`pretrain@step=1200`) of `spec`.

    Raises:
        SpecError: the point is not there or was not kept, an override changes what lies before it, or the recipe cannot be planned. Each
            problem with its place, in the new file where it is about that.
        StoreError: another file stands where the branch is to be written.
    """
    overrides = list(overrides)
    pipeline = load(spec)
    opened = Store.open(store or pipeline.store)
    plan = make(pipeline, opened)
    ref = _reference(pipeline, point, spec)
    if name in pipeline.stages:
        raise SpecError([Problem((), f"there is a stage '{name}' already", "choose another name.", "--name")])
    try:
        start = point_of(ref, plan.graph.trajectories, (), plan.graph.best)
    except SpecError as error:
        raise SpecError([replace(problem, where=point) for problem in error.problems]) from None
    _check_kept(plan, ref, start, point)
    path = output or Path(spec).parent / f"{name}.yaml"
    if path.resolve() == Path(spec).resolve():
        raise StoreError(f"'{path}' is the recipe that is branched; choose another name, or --output")
    if not path.parent.is_dir():
        raise StoreError(f"there is no folder '{path.parent}' to write {path.name} to")

    def drafted(ending: bool) -> tuple[str, Plan, list[str]]:
        draft = Draft(pipeline, name, os.path.relpath(Path(spec).resolve(), path.resolve().parent), extended(spec).data)
        notes = _fill(draft, plan, ref, start, overrides, ending=ending)
        options = [*(("--output", str(output)) if output else ()), *(x for o in overrides for x in ("--set", o))]
        command = " ".join(map(shlex.quote, ["apertus", "branch", spec, point, "--name", name, *options]))
        where = plan.graph.trajectories[start.phase]
        head = [
            f"A branch of {Path(spec).name} at step {start.step:,} of {start.phase} ({where.tokens_at(start.step):,} tokens):",
            "what comes before is shared, what comes behind is trained anew. Made by:",
            f"  {command}",
        ]
        text = written(draft, head)
        made = validate(expand(extended(path, text)))
        return text, make(made, opened), notes

    ending = any(plan.steps[node.name].action != "reuse" for node in plan.graph.segments(start.phase)[start.segment :])
    text, branched, notes = drafted(ending and _can_end(plan, ref, start))
    changed = _changed(plan, branched, start)
    if changed:
        raise SpecError([_not_shared(one, name) for one in changed])
    stands = path.exists()
    if stands and path.read_text(encoding="utf-8") != text:
        raise StoreError(f"'{path}' exists and is another file; choose another name, or --output, or remove it")
    before = {node.path for node in plan.graph.nodes.values()}
    _refer(branched, before)
    if not stands:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    shared = [node.name for node in branched.graph.nodes.values() if node.path in before]
    stored = sum(branched.steps[part].action == "reuse" for part in shared)
    return Made(path, text, not stands, shared, stored, [part for part in branched.graph.nodes if part not in shared], notes)


def _refer(branched: Plan, before: set[str]) -> None:
    """Says, beside the stored checkpoints of the original that new parts start from, that they do: pruning leaves them from now on."""
    for node, parent, step in branched.graph.starts(branched.pipeline):
        if node.path not in before and branched.steps[parent.name].stored:
            (hold if step in kept_steps(branched, parent) else refer)(branched.store, parent.path, step, node.path)


def _reference(pipeline: Pipeline, point: str, spec: str) -> Reference:
    try:
        ref = Reference.parse(point)
    except ValueError as error:
        raise SpecError([Problem((), str(error), where="STAGE@REF")]) from None
    stage = pipeline.stages.get(ref.stage)
    if stage is None:
        training = [name for name, other in pipeline.stages.items() if isinstance(other, TrainingStage)]
        raise SpecError([Problem((), f"there is no stage '{ref.stage}'", did_you_mean(ref.stage, training), spec)])
    if not isinstance(stage, TrainingStage):
        message = f"'{ref.stage}' is {a(stage.kind)}; there is no training in it to go on with"
        raise SpecError([Problem((), message, "branch a stage that trains.", spec)])
    parts = [phase.name for phase in stage.phases(ref.stage)]
    if ref.part is not None and ref.target not in parts:
        raise SpecError([Problem((), f"'{ref.stage}' has no part '{ref.part}'", did_you_mean(ref.target, parts), spec)])
    return ref


def _check_kept(plan: Plan, ref: Reference, start: Point, point: str) -> None:
    """SpecError for a step that a trajectory has passed without keeping it."""
    nodes = plan.graph.segments(start.phase)
    parent = plan.steps[nodes[start.segment].name]
    kept = [step for node in nodes for step in kept_steps(plan, node)]
    if (parent.action == "reuse" or (parent.resume_step or 0) > start.step) and start.step not in kept:
        message = f"step {start.step} of '{ref.target}' was not kept; kept are {', '.join(map(str, kept)) or 'none'}"
        fix = "branch at one of these; a step that a recipe starts from, or that stands in checkpoint.milestones, is kept."
        raise SpecError([Problem((), message, fix, point)])


def _changed(plan: Plan, branched: Plan, start: Point) -> list[tuple[Node, Node]]:
    """Parts up to the branch point, in both plans, that are not the same work; the first ones only."""
    found, seen = [], set()

    def visit(name: str) -> None:
        if name in seen:
            return
        seen.add(name)
        old = plan.graph.nodes[name]
        for parent in plan.graph.parents(old):
            visit(parent)
        new = branched.graph.nodes.get(name) or _segment(branched, old)
        if new is None or new.fingerprint != old.fingerprint:
            found.append((old, new or old))

    visit(plan.graph.segments(start.phase)[start.segment].name)
    return found[:1]


def _segment(branched: Plan, old: Node) -> Node | None:
    """The same segment under another name: a stage that ends earlier may have one only."""
    return next((node for node in branched.graph.segments(old.phase) if node.start_step == old.start_step), None) if old.phase else None


def _not_shared(changed: tuple[Node, Node], name: str) -> Problem:
    old, new = changed
    fields = ", ".join(change.name for change in changes(old.identity, new.identity)) or "what it reads"
    message = f"'{old.name}' would change ({fields}), and a branch shares everything before its point"
    return Problem(("stages", old.stage), message, f"change it in stages.{name}, or write a recipe of its own.", "--set")


# What the new stage says


def _fill(draft: Draft, plan: Plan, ref: Reference, start: Point, overrides: list[str], *, ending: bool) -> list[str]:
    """Adds the new stage, the references that move to it and the overrides; notes on what could not be taken over as it was. `ending`: the
    old stage ends at the point."""
    pipeline, trajectory = plan.pipeline, plan.graph.trajectories[start.phase]
    stage = pipeline.stages[ref.stage]
    assert isinstance(stage, TrainingStage)
    phases = stage.phases(ref.stage)
    index = next(i for i, phase in enumerate(phases) if phase.name == start.phase)
    notes: list[str] = []
    given = {override.partition("=")[0].strip() for override in overrides}
    at: FieldPath = ("stages", draft.name)
    point = f"{ref.target if ref.part or len(phases) == 1 else start.phase}@step={start.step}"
    data = pipeline._document.data["stages"][ref.stage] if pipeline._document else {}
    if isinstance(stage, LongContextStage):
        steps = [_rest(plan, phases[index], data["steps"][index], start, trajectory, given, notes, prefix=f"stages.{draft.name}.steps.0")]
        steps[0] = {"sequence_length": trajectory.sequence_length, "rope_theta": phases[index].rope_theta, **steps[0]}
        following = [{key: value for key, value in step.items() if value is not None} for step in data["steps"][index + 1 :]]
        new: dict[str, Any] = {"kind": stage.kind, "from": point, "steps": [*steps, *following]}
    else:
        kind = "cooldown" if stage.kind == "pretrain" else stage.kind
        rest = _rest(plan, phases[index], data, start, trajectory, given, notes, prefix=f"stages.{draft.name}")
        new = {"kind": kind, "from": point, **rest}
    at_end = start.step == trajectory.steps
    draft.add(
        at,
        new,
        f"resumes from {'the end' if at_end else f'step {start.step:,}'} of {start.phase}"
        + ("" if at_end else ", with what was left of it"),
    )
    if at_end and not any(path.startswith(f"stages.{draft.name}.") and path.endswith("budget") for path in given):
        message = f"'{point}' is the end of '{start.phase}': nothing of its budget is left"
        raise SpecError([Problem(at, message, f'state one: --set "stages.{draft.name}.budget=1000 steps".', "STAGE@REF")])
    left = _repoint(draft, plan, ref, start)
    if left:
        those = f"{', '.join(left)} read {ref.stage} as before"
        notes.append(f"{those}: a matrix states that for all of its variants; state stages that read {draft.name}")
    if ending and not left:
        _end(draft, plan, ref, start)
    elif not at_end and any(plan.steps[node.name].action != "reuse" for node in plan.graph.segments(start.phase)):
        why = "they read it" if left else "its schedule depends on it"
        notes.append(f"{ref.stage} itself trains on to its end, since {why}")
    for override in overrides:
        draft.override(override)
    draft.notes += notes
    return notes


def _rest(
    plan: Plan,
    phase: Phase,
    data: dict[str, Any],
    start: Point,
    trajectory: Trajectory,
    given: set[str],
    notes: list[str],
    *,
    prefix: str,
) -> dict[str, Any]:
    """The fields of a phase for what is left of it behind the point."""
    settings, segment = phase.settings, trajectory.segments[start.segment]
    following = [other for other in trajectory.segments if other.start_step >= start.step]
    current = following[0] if following and following[0].start_step == start.step else segment
    carry = ["weights", "data"] if getattr(settings, "lora", None) else ["weights", "optimizer", "data"]
    if "optimizer" not in carry:
        notes.append("an adapter is added to the weights and a new one begins, so the optimizer's states begin anew")
    fields: dict[str, Any] = {"carry": carry}
    taken = {key: data[key] for key in TAKEN if data.get(key) is not None}
    if isinstance(taken.get("checkpoint"), dict):
        taken["checkpoint"] = {key: value for key, value in taken["checkpoint"].items() if key != "milestones"}
    stated = settings.global_batch_size or {"0 samples": trajectory.segments[0].batch}
    sizes = batch_pieces(phase.path, stated, trajectory.sequence_length)
    if isinstance(settings, MixtureTraining):
        begins = [begin for begin, _ in mixture_pieces(phase.path, settings.mixture, sizes, trajectory.sequence_length)]
        mixtures = _pieces(settings.mixture, begins, start, trajectory)
        _check_annealed(plan, current, start, f"{prefix}.mixture" in given, prefix)
        fields["mixture"] = next(iter(mixtures.values())) if len(mixtures) == 1 else mixtures
    batches = _pieces(stated, [begin for begin, _ in sizes], start, trajectory)
    if len(batches) > 1:
        fields["global_batch_size"] = batches
    elif current.batch != segment.batch:
        fields["global_batch_size"] = current.batch
    left = _left(settings.budget, start, trajectory)
    fields["budget"] = _text(left) if left.amount > 0 else str(settings.budget)
    peak, schedule = _schedule(settings, start, trajectory, notes)
    if peak is not None:
        fields["optimizer"] = {"lr": peak}
    fields["schedule"] = schedule
    return fields | taken


def _check_annealed(plan: Plan, current: SegmentPlan, start: Point, replaced: bool, prefix: str) -> None:
    """SpecError for a point inside of an annealed mixture that the branch would train on."""
    name = current.mixture.partition("/")[0]
    stage = plan.pipeline.stages[name]
    if isinstance(stage, MixtureStage) and stage.anneal is not None and not replaced:
        message = f"'{name}' is annealed while '{start.phase}' trains on it, and would begin its annealing anew at the branch"
        raise SpecError([Problem(("stages", prefix.split(".")[1], "mixture"), message, f"state one: --set {prefix}=...", "STAGE@REF")])


def _pieces(stated: dict[str, Any], begins: list[int], start: Point, trajectory: Trajectory) -> dict[str, Any]:
    """A map from borders to values, as it is from the point on. `begins`: the samples at which the pieces begin, which are whole batches:
    a border that is stated in tokens may lie a little behind that."""
    found: dict[str, Any] = {}
    done = trajectory.tokens_at(start.step) // trajectory.sequence_length
    for (border, value), begin in zip(stated.items(), begins, strict=True):
        left = _left(Budget.parse(border), start, trajectory)
        if begin <= done:
            found = {f"0 {left.unit}": value}
        else:
            found[_text(left)] = value
    return found


def _left(budget: Budget, start: Point, trajectory: Trajectory) -> Budget:
    """What is left of an amount at the point; 0 or less where it lies before it."""
    tokens = trajectory.tokens_at(start.step)
    done = {"tokens": tokens, "samples": tokens // trajectory.sequence_length, "steps": start.step}[budget.unit]
    return Budget(budget.amount - done, budget.unit)


def _text(budget: Budget) -> str:
    return f"{budget.amount:_} {budget.unit}"


def _schedule(settings: Training, start: Point, trajectory: Trajectory, notes: list[str]) -> tuple[float | None, dict[str, Any]]:
    """The peak where it is not the rate at the point, and the schedule of what is left."""
    tokens, lr = trajectory.tokens_at(start.step), trajectory.lr_at(start.step)
    first, last = trajectory.segments[start.segment].schedule, trajectory.segments[-1].schedule
    peak: float | None = None
    fields: dict[str, Any] = {"decay": last.decay}
    factor = lr / last.peak if last.peak else 1.0
    if tokens < first.warmup_tokens:
        peak, factor = last.peak, 1.0
        fields |= {"warmup": f"{first.warmup_tokens - tokens:_} tokens", "warmup_from": round(first.factor(tokens), 9)}
        if last.decay != "none" and tokens >= last.decay_start:
            notes.append("warm-up and decay overlap at the branch point; the decay begins when the warm-up has ended")
    if last.decay == "none" or start.step == trajectory.steps:
        return peak, fields | {"decay": "none"}
    if tokens <= last.decay_start and settings.schedule.decay_over is not None:
        fields |= {"decay_over": f"{last.decay_tokens:_} tokens", "final": last.final}
    elif factor > 0:
        fields["final"] = min(1.0, round(last.final / factor, 9))
        if last.decay != "linear" and tokens > last.decay_start:
            notes.append(f"the point lies inside the {last.decay} decay, which begins anew from the rate there, {lr:.4g}")
    else:
        fields = {"decay": "none"}
    return peak, fields


# What moves to it


def _repoint(draft: Draft, plan: Plan, ref: Reference, start: Point) -> list[str]:
    """What reads the branched stage behind the point reads the new one. The stages of which a file cannot say so."""
    pipeline, trajectories = plan.pipeline, plan.graph.trajectories
    phases = [phase.name for phase in pipeline.stages[ref.stage].phases(ref.stage)]  # type: ignore[attr-defined]  # a stage that trains
    behind = set(phases[phases.index(start.phase) :])
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
            if there.phase not in behind or (there.phase == start.phase and there.step <= start.step and not last):
                continue
            state(path, str(_moved(draft.name, other, there, start, phases, trajectories)), f"was {other}")
        if ref.stage in stage.after:
            state(("stages", name, "after"), [draft.name if one == ref.stage else one for one in stage.after], f"was {ref.stage}")
        if isinstance(stage, MixtureStage) and ref.stage in stage.exclude:
            state(("stages", name, "exclude"), [*stage.exclude, draft.name], "")
    return list(left)


def _moved(name: str, other: Reference, there: Point, start: Point, phases: list[str], trajectories: Any) -> Reference:
    """The same place in the new stage."""
    part = str(phases.index(there.phase) - phases.index(start.phase) + 1) if other.part is not None else None
    if there.phase != start.phase:
        return replace(other, stage=name, part=part)
    done = trajectories[start.phase].tokens_at(start.step)
    step = other.step - start.step if other.step is not None else None
    return replace(other, stage=name, part=part, step=step, tokens=other.tokens - done if other.tokens is not None else None)


def _can_end(plan: Plan, ref: Reference, start: Point) -> bool:
    """Whether the branched stage can end at the point without a change of what lies before it, and a file can say so."""
    stage = plan.pipeline.stages[ref.stage]
    document = plan.pipeline._document
    if not isinstance(stage, Training) or document is None or any(ref.stage in made for made in document.variants.values()):
        return False
    trajectory = plan.graph.trajectories[start.phase]
    last = trajectory.segments[-1].schedule
    return last.decay == "none" or (stage.schedule.decay_over is not None and trajectory.tokens_at(start.step) <= last.decay_start)


def _end(draft: Draft, plan: Plan, ref: Reference, start: Point) -> None:
    """Lets the branched stage end at the point."""
    stage, trajectory = plan.pipeline.stages[ref.stage], plan.graph.trajectories[start.phase]
    assert isinstance(stage, Training)
    at: FieldPath = ("stages", ref.stage)
    for name, stated in (("global_batch_size", stage.global_batch_size or {}), ("mixture", stage.data)):
        for border in list(stated)[1:]:
            if _left(Budget.parse(border), start, trajectory).amount >= 0:
                draft.add((*at, name, border), None, "")
    if trajectory.segments[-1].schedule.decay != "none":
        draft.add((*at, "schedule", "decay"), "none", "")
    draft.add((*at, "budget"), f"{start.step} steps", f"ends where the branch begins: it had {trajectory.steps:,} steps")
