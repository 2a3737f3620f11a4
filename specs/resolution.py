"""Resolves stages as written to trajectories. A training stage has segments with whole steps, and all
inherited settings filled in; a merge, a rewrite or a selection has the trajectory of a checkpoint.

Mixture, batch size and learning rate are piecewise functions of what the stage has consumed; the stage is cut
at their breakpoints. Breakpoints and the budget are floored to whole batches; the tokens left over are kept
for messages.

Invariant: everything here is integer arithmetic on the spec alone; no store, no fingerprint. Nothing after a
breakpoint influences what comes before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar, cast

from specs.errors import Problem, SpecError
from specs.mamba import Mamba, NewMixers
from specs.model import ModelSpec
from specs.piecewise import (
    Pieces,
    annealed_pieces,
    batch_pieces,
    check_steps,
    full_schedule,
    mixture_pieces,
    seen_within,
    whole_batches,
    whole_budget,
)
from specs.schedule import Schedule, ScheduleSpec
from specs.settings import Phase, Settings, Training
from specs.stages.merge import MergeStage
from specs.stages.mixture import Anneal, MixtureStage
from specs.stages.rewrite import RewriteStage
from specs.stages.select import SelectStage
from specs.trainable import problems, trained
from specs.trajectory import (
    Best,
    Point,
    SegmentPlan,
    Trajectories,
    Trajectory,
    candidates,
    different_fields,
    phase_of,
    phases,
    point_of,
)
from specs.units import REST, Budget

if TYPE_CHECKING:
    from specs.pipeline import Pipeline

V = TypeVar("V")
INHERITED = ("sequence_length", "precision", "goldfish", "z_loss", "packing")
"""The settings of a parent that hold where a phase states none; of the optimizer, `OptimizerSpec.resolved`
decides."""


def resolve(
    pipeline: Pipeline,
    names: list[str],
    best: Best | None = None,
    models: Mapping[str, Trajectory] | None = None,
) -> Trajectories:
    """The trajectories, by phase, of the training stages, merges and selections among `names` (inputs first).

    `best` are the steps of `@best:` references and the choices of selections, which only a store knows; for a
    missing one the last step, or the first candidate, is used. `models` are the Hugging Face models that the
    recipe names (`imported`), which are read from their folders.

    Raises SpecError with all problems. Phases that depend on an invalid phase, or on a model that is not
    given, are left out."""
    trajectories: Trajectories = dict(models or {})
    problems: list[Problem] = []
    annealed = {
        name: anneal
        for name, stage in pipeline.stages.items()
        if stage.annealed and (anneal := cast(MixtureStage, stage).anneal) is not None
    }
    for name in names:
        stage = pipeline.stages.get(name)
        derive = None if stage is None else DERIVED.get(stage.kind)
        try:
            derived = derive and derive(pipeline, name, trajectories, best or {})
            if derived is not None:
                trajectories[name] = derived
            for phase in phases(pipeline, name):
                if phase.parent is None or phase_of(phase.parent, trajectories) in trajectories:
                    trajectories[phase.name] = _trajectory(phase, trajectories, best or {}, annealed)
        except SpecError as error:
            problems += error.problems
    if problems:
        raise SpecError(problems)
    return trajectories


def _check_imported(phase: Phase, stage: Training) -> None:
    """Checks a phase whose parent is a Hugging Face model. Such a model has weights only, so the phase must
    state what it would otherwise inherit. Raises SpecError with everything that is missing."""
    problems = []
    if missing := [what for what in phase.carry if what != "weights"]:
        message = f"'{phase.parent}' has weights only; there is no {' and no '.join(missing)} to carry"
        problems.append(Problem((*phase.path, "carry"), message, "set carry: [weights]."))
    inherited = {"optimizer.lr": stage.optimizer.lr, "global_batch_size": stage.global_batch_size}
    for field, value in inherited.items():
        if value is None:
            message = f"'{phase.parent}' has weights only; there is no {field} to inherit"
            problems.append(Problem((*phase.path, *field.split(".")), message, f"set {field}."))
    for field in ("global_batch_size", "mixture", "schedule", "budget"):
        if (stage.data if field == "mixture" else getattr(stage, field)) == REST:
            message = f"'{phase.parent}' has weights only; there is no training to continue"
            problems.append(Problem((*phase.path, field), message, f"set {field}."))
    if problems:
        raise SpecError(problems)


def _filled(
    phase: Phase, start: Point | None, parent: Trajectory | None
) -> tuple[dict[str, int], dict[str, str], Budget]:
    """The batches and mixtures by where they begin, and the budget, as the phase states them.

    `rest of parent` is replaced by what the parent has planned after the point, in tokens; at the parent's
    end, by its last batch and mixture. The batch is the parent's if none is stated."""
    batches, mixtures, budget = phase.training.global_batch_size, phase.training.data, phase.training.budget
    if start is not None and parent is not None:
        done = parent.tokens_at(start.step)
        left = [segment for segment in parent.planned if segment.end_step > start.step]
        left = left or [parent.planned[-1]]
        length = parent.settings.sequence_length
        begins = [f"{max(0, segment.start_sample * length - done)} tokens" for segment in left]
        if mixtures == REST and not left[0].mixture:
            message = f"'{start.phase}' trains on no mixture, so there is no rest of it to train on"
            raise SpecError.of((*phase.path, "mixture"), message, "name a mixture.")
        if batches == REST:
            batches = _where_they_change(begins, [segment.batch for segment in left])
        if mixtures == REST:
            mixtures = _where_they_change(begins, [segment.mixture for segment in left])
        if budget == REST:
            budget = Budget(parent.planned_tokens - done, "tokens")
            if not budget.amount:
                message = f"'{phase.parent}' is the end of '{start.phase}': nothing of its budget is left"
                raise SpecError.of((*phase.path, "budget"), message, "set one, such as 1000 steps.")
        batches = batches or {"0 samples": parent.segments[start.segment].batch}
    assert isinstance(batches, dict) and isinstance(mixtures, dict) and isinstance(budget, Budget)
    return batches, mixtures, budget


def _where_they_change(begins: list[str], values: list[V]) -> dict[str, V]:
    """The values by where they begin, without those that only repeat the value before."""
    changes = zip(begins, values, [None, *values], strict=False)
    return {begin: value for begin, value, before in changes if value != before}


def _with_mixers(phase: Phase, new: NewMixers, model: ModelSpec) -> ModelSpec:
    """The model of a phase that replaces attention in layers, in addition to the layers replaced before."""
    at, before = (*phase.path, "mamba"), model.mamba_layers
    if again := sorted(set(before) & set(new.numbers(model.n_layers))):
        message = f"layers {', '.join(map(str, again))} of '{phase.parent}' have no attention"
        raise SpecError.of((*at, "layers"), message, "name layers that have.")
    for name in ("conv_width", "decay") if model.mamba is not None else ():
        if (old := getattr(model.mamba, name)) != getattr(new, name):
            message = f"it differs from that of the mixers of '{phase.parent}'"
            raise SpecError.of((*at, name), message, f"set {name}: {str(old).lower()}.")
    fields = new.model_dump(exclude={"initial"})
    if before:
        fields["layers"] = sorted([*before, *new.numbers(model.n_layers)])
    model = model.model_copy(update={"mamba": Mamba.model_validate(fields)})
    if obstacle := model.mamba_obstacle:
        raise SpecError.of(at, obstacle.removeprefix("mamba: "), "name other layers, or another checkpoint.")
    return model


def _check_parent(phase: Phase, start: Point, parent: Trajectory) -> None:
    """Raises SpecError if the phase takes over something that the parent does not have."""
    at, stage = phase.path, phase.training
    if parent.origin == "merge" and "optimizer" in phase.carry:
        message = f"'{phase.parent}' is a merge, which has no optimizer states to carry"
        raise SpecError.of((*at, "carry"), message, "set carry: [weights].")
    if parent.origin == "import":
        _check_imported(phase, stage)
    theirs, own = parent.settings.optimizer.name, stage.optimizer.name
    if "optimizer" in phase.carry and own not in (None, theirs):
        message = f"the states to carry are those of {theirs}, which {own} cannot use"
        carried = ", ".join(what for what in phase.carry if what != "optimizer")
        raise SpecError.of((*at, "carry"), message, f"set carry: [{carried}].")
    if not parent.lr_at(start.step) and (stage.schedule == REST or stage.optimizer.lr is None):
        decayed = f"the learning rate has decayed to 0 at step {start.step} of '{start.phase}'"
        message = f"{decayed}, so there is none to inherit"
        field = ("schedule",) if stage.schedule == REST else ("optimizer", "lr")
        raise SpecError.of((*at, *field), message, f"set {'.'.join(field)}.")


def _trajectory(
    phase: Phase, trajectories: Trajectories, best: Best, annealed: Mapping[str, Anneal]
) -> Trajectory:
    at, stage = phase.path, phase.training
    start: Point | None = None
    parent: Trajectory | None = None
    if phase.parent is not None:
        start = point_of(phase.parent, trajectories, (*at, "from"), best)
        parent = trajectories[start.phase]
        _check_parent(phase, start, parent)
    model = _model(phase, parent)
    settings = settings_of(phase, model, start, parent)
    length = settings.sequence_length
    batches, begins, budget = _filled(phase, start, parent)
    pieces = batch_pieces(at, batches, length)
    total, leftover = whole_budget((*at, "budget"), budget, pieces, length)
    named = mixture_pieces(at, begins, pieces, length)
    mixtures = annealed_pieces(at, named, annealed, pieces, length, total)
    full, cut = _schedule(phase, budget, pieces, length, start, parent)
    breakpoints = {begin for begin, _ in pieces} | {begin for begin, _ in mixtures} | {total}
    if cut:
        breakpoints.add(whole_batches((full.decay_start - full.offset) // length, pieces))
    own = {begin for begin, _ in pieces} if stage.global_batch_size != REST else set()
    own |= {begin for begin, _ in mixtures} if stage.data != REST else set()
    for begin in sorted(own):
        if begin >= total:
            ends = f"after the stage ends at {total * length:,} tokens"
            message = f"breakpoint {begin * length:,} tokens is {ends}"
            raise SpecError.of((*at, "budget"), message, "raise the budget, or remove the breakpoint.")
    planned: list[SegmentPlan] = []
    for begin, end in pairwise(sorted(point for point in breakpoints if point <= total)):
        batch = next(value for point, value in reversed(pieces) if point <= begin)
        mixture = next(value for point, value in reversed(mixtures) if point <= begin)
        step = planned[-1].end_step if planned else 0
        schedule = seen_within(full, begin * length, end * length)
        planned.append(SegmentPlan(mixture, batch, begin, end, step, schedule))
    check_steps(at, stage, planned[-1].end_step)
    stop = whole_budget((*at, "stop_at"), stage.stop_at, pieces, length)[0] if stage.stop_at else total
    if stop > total:
        message = f"{stage.stop_at} is after the end of the stage at {total * length:,} tokens"
        raise SpecError.of((*at, "stop_at"), message, "lower it, or raise the budget.")
    return Trajectory(
        stage=phase.stage,
        model=model,
        seed=phase.seed,
        settings=settings,
        carry=phase.carry,
        parent=start,
        segments=tuple(
            replace(part, end_sample=min(part.end_sample, stop))
            for part in planned
            if part.start_sample < stop
        ),
        planned=tuple(planned),
        schedule=full,
        leftover_tokens=leftover if stop == total else 0,
        context_length=max(length, parent.context_length if parent is not None else 0),
        chat=phase.chat or (parent is not None and parent.chat),
    )


def _model(phase: Phase, parent: Trajectory | None) -> ModelSpec:
    """The model of a phase: its own, or the parent's with what the phase changes."""
    if parent is None:
        assert phase.model is not None
        return phase.model
    changed = {"rope_theta": phase.rope_theta, "head": phase.head}
    model = parent.model.model_copy(update={name: value for name, value in changed.items() if value})
    return model if phase.mamba is None else _with_mixers(phase, phase.mamba, model)


def settings_of(phase: Phase, model: ModelSpec, start: Point | None, parent: Trajectory | None) -> Settings:
    """The settings of a phase: those that it states; those of its parent that it inherits, with the learning
    rate at the point where it starts; and defaults for the others."""
    stage, optimizer = phase.training, {}
    values = stage.stated_settings()
    if start is not None and parent is not None:
        of_parent = stage.inherited(parent.settings)
        for name in INHERITED:
            own = name in values and name in stage.model_fields_set
            if not own or (values[name] is None and name != "goldfish"):  # of Goldfish, None is a setting
                values[name] = getattr(of_parent, name)
        if parent.origin != "import":
            rest = stage.schedule == REST
            rate = parent.settings.optimizer.lr if rest else parent.lr_at(start.step)
            optimizer = parent.settings.optimizer.model_dump() | {"lr": rate}
    values["trainable"] = _trainable(phase, model, parent)
    values["optimizer"] = stage.optimizer.resolved(optimizer, (*phase.path, "optimizer"))
    return Settings(**{name: value for name, value in values.items() if value is not None})


def _schedule(
    phase: Phase, budget: Budget, pieces: Pieces, length: int, start: Point | None, parent: Trajectory | None
) -> tuple[Schedule, bool]:
    """The schedule of a phase, and whether a segment begins where it starts to decay."""
    schedule = phase.training.schedule
    if isinstance(schedule, ScheduleSpec):
        full = full_schedule(phase.path, schedule, budget, pieces, length)
        # a decay over the whole stage leaves no segment before it
        return full, full.decay != "none" and schedule.decay_over is not None
    assert start is not None and parent is not None
    done = parent.schedule.offset + parent.tokens_at(start.step)
    return parent.schedule.model_copy(update={"offset": done}), parent.schedule.decay_start > done


def _trainable(phase: Phase, model: ModelSpec, parent: Trajectory | None) -> list[str]:
    """The patterns of the parameters that a phase trains. Raises SpecError for patterns that fit no
    parameter, and for optimizer states to carry that the parent does not have."""
    patterns, at = phase.training.trained(model, phase.path), (*phase.path, "trainable")
    wrong = problems(at, model, patterns)
    if patterns and phase.training.adapters is not None:
        message = "with lora, adapters are trained and no parameter of the model"
        wrong = [Problem(at, message, "leave out trainable or lora.")]
    if parent is not None and "optimizer" in phase.carry and parent.settings.trainable:
        missing = trained(model, patterns).keys() - trained(model, parent.settings.trainable).keys()
        if missing:
            message = f"'{phase.parent}' has no optimizer states of {min(missing)}, which it did not train"
            fix = "set carry: [weights], or the parent's trainable."
            wrong.append(Problem((*phase.path, "carry"), message, fix))
    if wrong:
        raise SpecError(wrong)
    return sorted(set(patterns))


def _merged(pipeline: Pipeline, name: str, trajectories: Trajectories, best: Best) -> Trajectory | None:
    stage = cast(MergeStage, pipeline.stages[name])
    if not all(phase_of(ref, trajectories) in trajectories for ref in stage.parents):
        return None
    paths = [
        ("stages", name, *(("checkpoints", index) if index < len(stage.checkpoints) else ("base",)))
        for index in range(len(stage.parents))
    ]
    named = zip(stage.parents, paths, strict=True)
    branches = [point_of(ref, trajectories, path, best) for ref, path in named]
    parents = [trajectories[start.phase] for start in branches]
    first = next((parent for parent in parents if parent.origin != "import"), parents[0])
    for ref, other, path in zip(stage.parents, parents, paths, strict=True):
        if fields := different_fields(other.model, first.model):
            message = f"'{ref}' and '{stage.parents[parents.index(first)]}' differ in {fields}"
            raise SpecError.of(path, message, "merge checkpoints of the same dimensions.")
    return replace(_alone(name, first, branches[parents.index(first)]), parent=None, origin="merge")


def _alone(name: str, trajectory: Trajectory, start: Point) -> Trajectory:
    """A checkpoint of a trajectory as a trajectory of a single step, of the stage `name`."""
    batch = trajectory.segments[start.segment].batch
    still = SegmentPlan("", batch, 0, batch, 0, Schedule())
    held = trajectory.settings.optimizer.model_copy(update={"lr": trajectory.lr_at(start.step)})
    settings = trajectory.settings.model_copy(update={"optimizer": held})
    alone = replace(trajectory, segments=(still,), planned=(still,), schedule=still.schedule)
    return replace(alone, settings=settings, stage=name, seed=None, carry=(), leftover_tokens=0)


def _rewritten(pipeline: Pipeline, name: str, trajectories: Trajectories, best: Best) -> Trajectory | None:
    stage, at = cast(RewriteStage, pipeline.stages[name]), ("stages", name)
    if phase_of(stage.from_, trajectories) not in trajectories:
        return None
    start = point_of(stage.from_, trajectories, (*at, "from"), best)
    parent = trajectories[start.phase]
    if stage.layer_pairs is not None:
        if parent.model.method is not None:
            message = f"the layers of '{stage.from_}' have another order already: {parent.model.method[0]}"
            fix = "name a checkpoint whose layers run one after the other."
            raise SpecError.of((*at, "from"), message, fix)
        if obstacle := stage.layer_pairs.obstacle(parent.model.n_layers):
            raise SpecError.of((*at, "layer_pairs"), obstacle, "set a range inside the model.")
    model = parent.model.model_copy(update=stage.changes)
    if model == parent.model:
        (field,) = stage.changes
        message = f"'{stage.from_}' is computed in that way already"
        raise SpecError.of((*at, field), message, "set another, or leave out the stage.")
    if obstacle := model.attention_obstacle:
        message, _, _ = obstacle.partition(";")
        fix = "name a checkpoint whose layers read their own keys alone."
        raise SpecError.of((*at, "attention"), f"'{stage.from_}': {message}", fix)
    return replace(_alone(name, parent, start), model=model, parent=start, origin="rewrite")


def _selected(pipeline: Pipeline, name: str, trajectories: Trajectories, best: Best) -> Trajectory | None:
    """The trajectory of the candidate that is currently chosen. All candidates have the same dimensions, so
    later stages can be planned before the choice; candidates may be computed in different ways."""
    stage, among = cast(SelectStage, pipeline.stages[name]), candidates(pipeline, name)
    known = all(ref.stage in pipeline.stages for ref in stage.evaluations)
    if not known or not all(phase_of(ref, trajectories) in trajectories for _, ref in among):
        return None
    starts = [point_of(ref, trajectories, path, best) for path, ref in among]
    models = [trajectories[start.phase].model.without_method for start in starts]
    for (path, ref), model in zip(among, models, strict=True):
        if fields := different_fields(model, models[0]):
            message = f"'{ref}' and '{among[0][1]}' differ in {fields}"
            raise SpecError.of(path, message, "choose among checkpoints of the same dimensions.")
    chosen = starts[best.get(name, 0)]
    return replace(trajectories[chosen.phase], stage=name, stands_for=chosen)


DERIVED = {"select": _selected, "merge": _merged, "rewrite": _rewritten}
"""The trajectories of the kinds that make a checkpoint of others; None as long as one of these is missing."""
