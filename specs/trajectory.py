"""From training stages as written to trajectories: segments with whole steps, and all settings that are inherited filled in.

Mixture, batch size and learning rate are piecewise functions of what the stage has consumed; their borders cut it. Borders and the budget
are floored to whole batches, and what is left over is kept to be printed.

Invariant: everything here is integer arithmetic on the spec alone; no store, no fingerprint. What lies behind a border has no influence
on what stands before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

from specs.errors import FieldPath, Problem, SpecError
from specs.model import ModelSpec
from specs.optimizer import OptimizerSpec
from specs.piecewise import (
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
from specs.stages.base import FromCheckpoint
from specs.stages.merge import MergeStage
from specs.stages.mixture import Anneal, MixtureStage
from specs.stages.select import SelectStage
from specs.stages.training import Carry, Goldfish, MixtureTraining, Packing, Phase, Precision, Training, TrainingStage
from specs.units import REST, Budget, Reference

if TYPE_CHECKING:
    from specs.pipeline import Pipeline


V = TypeVar("V")


@dataclass(frozen=True)
class SegmentPlan:
    """A segment: constant mixture and batch. Samples and steps count within the phase; `[start, end)` in samples. A piece of an annealed
    mixture is named `mixture/1`."""

    mixture: str
    batch: int
    start_sample: int
    end_sample: int
    start_step: int
    schedule: Schedule

    @property
    def steps(self) -> int:
        return (self.end_sample - self.start_sample) // self.batch

    @property
    def end_step(self) -> int:
        return self.start_step + self.steps


@dataclass(frozen=True)
class Point:
    """Where a phase starts: step `step` of the segment with index `segment` of the phase `phase`."""

    phase: str
    segment: int
    step: int


@dataclass(frozen=True)
class Trajectory:
    """A phase of a training stage with every setting resolved. `context_length`: the longest sequences on the way to it. `chat`: its model
    ends turns. A merge is a trajectory of one step, in which nothing is trained, and so is a Hugging Face model (`imported`), of which only
    the weights are known. A selection is the trajectory of the checkpoint that it `stands_for`."""

    stage: str
    model: ModelSpec
    seed: int | None
    sequence_length: int
    optimizer: OptimizerSpec
    precision: Precision
    goldfish: Goldfish | None
    packing: Packing
    carry: tuple[Carry, ...]
    parent: Point | None
    segments: tuple[SegmentPlan, ...]
    planned: tuple[SegmentPlan, ...]  # of the whole budget; `segments` are those up to `stop_at`
    schedule: Schedule  # of the whole budget
    leftover_tokens: int
    context_length: int
    chat: bool = False
    merged: bool = False
    imported: bool = False
    stands_for: Point | None = None

    @property
    def steps(self) -> int:
        return self.segments[-1].end_step

    @property
    def tokens(self) -> int:
        return self.segments[-1].end_sample * self.sequence_length

    @property
    def planned_tokens(self) -> int:
        return self.planned[-1].end_sample * self.sequence_length

    def tokens_at(self, step: int) -> int:
        """Tokens consumed by the phase after `step` steps."""
        segment = self.segments[self.segment_of(step)]
        return (segment.start_sample + (step - segment.start_step) * segment.batch) * self.sequence_length

    def segment_of(self, step: int) -> int:
        """Index of the segment whose end or inside is that step; the first for step 0."""
        return next(index for index, segment in enumerate(self.segments) if step <= segment.end_step)

    def lr_at(self, step: int) -> float:
        """Learning rate that the step after `step` would have."""
        return self.segments[self.segment_of(step)].schedule.lr(self.tokens_at(step))


Best = Mapping[str, int]  # `@best:` reference -> the step that it means; name of a selection -> which of its candidates


def phases(pipeline: Pipeline, name: str) -> list[Phase]:
    """The phases of a stage; none for one that does not train."""
    stage = pipeline.stages.get(name)
    return stage.phases(name) if isinstance(stage, TrainingStage) else []


def imported(reference: str, model: ModelSpec, *, context: int, chat: bool) -> Trajectory:
    """A Hugging Face model as what other stages start from. `reference` with `hf:`; `context`: its longest sequences, in tokens."""
    still = SegmentPlan("", 1, 0, 1, 0, Schedule(peak=0.0))
    return Trajectory(
        stage=reference,
        model=model,
        seed=None,
        sequence_length=context,
        optimizer=OptimizerSpec(),
        precision=Precision(),
        goldfish=Goldfish(),
        packing="concatenate",
        carry=(),
        parent=None,
        segments=(still,),
        planned=(still,),
        schedule=still.schedule,
        leftover_tokens=0,
        context_length=context,
        chat=chat,
        imported=True,
    )


def resolve(
    pipeline: Pipeline, names: list[str], best: Best | None = None, models: Mapping[str, Trajectory] | None = None
) -> dict[str, Trajectory]:
    """The trajectories, by phase, of the training stages, merges and selections among `names` (inputs first).

    `best` are the steps of `@best:` references and the choices of selections, which only a store knows; the last step, or the first
    candidate, stands in for one that is missing. `models` are the Hugging Face models that the recipe names (`imported`), which only their
    folders know.

    SpecError with all problems; what depends on a wrong one, or on a model that is not given, is left out."""
    found: dict[str, Trajectory] = dict(models or {})
    problems: list[Problem] = []
    annealed = {name: stage.anneal for name, stage in pipeline.stages.items() if isinstance(stage, MixtureStage) and stage.anneal}
    for name in names:
        stage = pipeline.stages.get(name)
        try:
            if isinstance(stage, SelectStage) and all(phase_of(ref, found) in found for _, ref in candidates(pipeline, name)):
                found[name] = _selected(pipeline, name, found, best or {})
            if isinstance(stage, MergeStage) and all(phase_of(ref, found) in found for ref in stage.checkpoints):
                found[name] = _merged(name, stage, found, best or {})
            for phase in phases(pipeline, name):
                if phase.parent is None or phase_of(phase.parent, found) in found:
                    found[phase.name] = _trajectory(phase, found, best or {}, annealed)
        except SpecError as error:
            problems += error.problems
    if problems:
        raise SpecError(problems)
    return found


def phase_of(ref: Reference, found: Mapping[str, Trajectory]) -> str:
    """The phase that a reference leads to: the one it names, or the last of the stage. The name itself where there is none."""
    if ref.part is not None:
        return f"{ref.stage}/{ref.part}"
    return next((phase for phase in reversed(list(found)) if found[phase].stage == ref.stage), ref.stage)


def point_of(ref: Reference, parents: Mapping[str, Trajectory], path: FieldPath, best: Best | None = None) -> Point:
    """The step that a reference names. SpecError when the phase does not reach it."""
    phase = phase_of(ref, parents)
    parent = parents[phase]
    if parent.stands_for is not None:
        if (ref.step, ref.tokens, ref.best) != (None, None, None):
            raise SpecError([Problem(path, f"'{ref}' names a step, and '{phase}' is one checkpoint", f"name '{phase}' alone.")])
        return parent.stands_for
    step = (best or {}).get(str(ref), parent.steps)
    if ref.step is not None:
        step = ref.step
    elif ref.tokens is not None:
        step = max(
            (s for segment in parent.segments if (s := _step_at(segment, ref.tokens // parent.sequence_length)) is not None), default=0
        )
    asked = ref.tokens if ref.tokens is not None else None
    if not 0 < step <= parent.steps or (asked is not None and asked > parent.tokens):
        message = f"'{ref}' lies outside stage '{phase}', which has {parent.steps} steps ({parent.tokens:,} tokens)"
        raise SpecError([Problem(path, message, "name a step inside it, or raise its budget.")])
    return Point(phase, parent.segment_of(step), step)


def _step_at(segment: SegmentPlan, sample: int) -> int | None:
    """The last whole step of a segment that has consumed no more than `sample` samples; None before the segment."""
    return (
        segment.start_step + min((sample - segment.start_sample) // segment.batch, segment.steps)
        if sample >= segment.start_sample
        else None
    )


def _merged(name: str, stage: MergeStage, found: dict[str, Trajectory], best: Best) -> Trajectory:
    branches = [point_of(ref, found, ("stages", name, "checkpoints", index), best) for index, ref in enumerate(stage.checkpoints)]
    parents = [found[start.phase] for start in branches]
    first = next((parent for parent in parents if not parent.imported), parents[0])
    for index, other in enumerate(parents):
        if other.model.identity_fields() != first.model.identity_fields():
            message = f"'{stage.checkpoints[index]}' is another model than '{stage.checkpoints[parents.index(first)]}'"
            raise SpecError([Problem(("stages", name, "checkpoints", index), message, "average checkpoints of the same dimensions.")])
    start = branches[parents.index(first)]
    batch = first.segments[start.segment].batch
    still = SegmentPlan("", batch, 0, batch, 0, Schedule(peak=first.lr_at(start.step)))
    alone = replace(first, segments=(still,), planned=(still,), schedule=still.schedule, leftover_tokens=0)
    return replace(alone, stage=name, seed=None, carry=(), parent=None, merged=True)


def candidates(pipeline: Pipeline, name: str) -> list[tuple[FieldPath, Reference]]:
    """The checkpoints that a selection chooses among, each with where it is named. Wrong evaluations are left out."""
    stage = pipeline.stages[name]
    assert isinstance(stage, SelectStage)
    evaluated = [(other, pipeline.stages.get(other)) for other in (ref.stage for ref in stage.evaluations)]
    return [(("stages", name, "checkpoints", index), ref) for index, ref in enumerate(stage.checkpoints)] + [
        (("stages", other, "from"), evaluation.from_) for other, evaluation in evaluated if isinstance(evaluation, FromCheckpoint)
    ]


def _selected(pipeline: Pipeline, name: str, found: dict[str, Trajectory], best: Best) -> Trajectory:
    """The trajectory of the candidate that is chosen now. All have the same dimensions, so that what follows can be planned before."""
    among = candidates(pipeline, name)
    starts = [point_of(ref, found, path, best) for path, ref in among]
    models = [found[start.phase].model.identity_fields() for start in starts]
    for (path, ref), model in zip(among, models, strict=True):
        if model != models[0]:
            message = f"'{ref}' is another model than '{among[0][1]}'"
            raise SpecError([Problem(path, message, "choose among checkpoints of the same dimensions.")])
    chosen = starts[best.get(name, 0)]
    return replace(found[chosen.phase], stage=name, stands_for=chosen)


def _check_imported(phase: Phase, stage: Training) -> None:
    """A Hugging Face model has weights only, so what a stage inherits otherwise has to be stated. SpecError with all that is missing."""
    problems = []
    if missing := [what for what in phase.carry if what != "weights"]:
        message = f"'{phase.parent}' has weights only; there is no {' and no '.join(missing)} to carry"
        problems.append(Problem((*phase.path, "carry"), message, "state carry: [weights]."))
    for field, absent in (("optimizer.lr", stage.optimizer.lr is None), ("global_batch_size", stage.global_batch_size is None)):
        if absent:
            message = f"'{phase.parent}' has weights only; there is no {field} to go on with"
            problems.append(Problem((*phase.path, *field.split(".")), message, f"state {field}."))
    rests = {"global_batch_size": stage.global_batch_size, "mixture": stage.data, "schedule": stage.schedule, "budget": stage.budget}
    for field, value in rests.items():
        if value == REST:
            message = f"'{phase.parent}' has weights only; there is no training to go on with"
            problems.append(Problem((*phase.path, field), message, f"state {field}."))
    if problems:
        raise SpecError(problems)


def _filled(phase: Phase, start: Point | None, parent: Trajectory | None) -> tuple[dict[str, int], dict[str, str], Budget]:
    """Batches and mixtures by where they begin, and the budget, as the phase states them.

    In place of `rest of parent` stands what the parent has planned after the point, in tokens; at its end, its last
    batch and mixture. The batch is the parent's where none is stated."""
    batches, mixtures, budget = phase.settings.global_batch_size, phase.settings.data, phase.settings.budget
    if start is not None and parent is not None:
        done = parent.tokens_at(start.step)
        behind = [segment for segment in parent.planned if segment.end_step > start.step] or [parent.planned[-1]]
        begins = [f"{max(0, segment.start_sample * parent.sequence_length - done)} tokens" for segment in behind]
        if mixtures == REST and not behind[0].mixture:
            message = f"'{start.phase}' trains on no mixture, so there is no rest of it to go on with"
            raise SpecError([Problem((*phase.path, "mixture"), message, "name a mixture.")])
        if batches == REST:
            batches = _where_they_change(begins, [segment.batch for segment in behind])
        if mixtures == REST:
            mixtures = _where_they_change(begins, [segment.mixture for segment in behind])
        if budget == REST:
            budget = Budget(parent.planned_tokens - done, "tokens")
            if not budget.amount:
                message = f"'{phase.parent}' is the end of '{start.phase}': nothing of its budget is left"
                raise SpecError([Problem((*phase.path, "budget"), message, "state one, such as 1000 steps.")])
        batches = batches or {"0 samples": parent.segments[start.segment].batch}
    assert isinstance(batches, dict) and isinstance(mixtures, dict) and isinstance(budget, Budget)
    return batches, mixtures, budget


def _where_they_change(begins: list[str], values: list[V]) -> dict[str, V]:
    """Values by where they begin, without those that only repeat the one before."""
    changes = zip(begins, values, [None, *values], strict=False)
    return {begin: value for begin, value, before in changes if value != before}


def _trajectory(phase: Phase, found: dict[str, Trajectory], best: Best, annealed: Mapping[str, Anneal]) -> Trajectory:
    at, stage = phase.path, phase.settings
    start: Point | None = None
    parent: Trajectory | None = None
    inherited: dict[str, object] = {}
    goldfish = stage.goldfish if isinstance(stage, MixtureTraining) else None
    packing = stage.packing if isinstance(stage, MixtureTraining) else None
    if phase.parent is not None:
        start = point_of(phase.parent, found, (*at, "from"), best)
        parent = found[start.phase]
        if parent.merged and "optimizer" in phase.carry:
            message = f"'{phase.parent}' is a merge, which has no optimizer states to carry"
            raise SpecError([Problem((*at, "carry"), message, "state carry: [weights].")])
        if parent.imported:
            _check_imported(phase, stage)
        peak = parent.schedule.peak if stage.schedule == REST else parent.lr_at(start.step)
        inherited = {} if parent.imported else parent.optimizer.model_dump() | {"lr": peak}
        if "optimizer" in phase.carry and stage.optimizer.name not in (None, parent.optimizer.name):
            message = f"the states to carry are those of {parent.optimizer.name}, which {stage.optimizer.name} cannot go on with"
            carried = ", ".join(what for what in phase.carry if what != "optimizer")
            raise SpecError([Problem((*at, "carry"), message, f"state carry: [{carried}].")])
        field = ("schedule",) if stage.schedule == REST else ("optimizer", "lr")
        if not parent.lr_at(start.step) and (stage.schedule == REST or stage.optimizer.lr is None):
            message = f"the learning rate has decayed to 0 at step {start.step} of '{start.phase}', so there is none to go on with"
            raise SpecError([Problem((*at, *field), message, f"state {'.'.join(field)}.")])
        model, length, precision = parent.model, stage.sequence_length or parent.sequence_length, stage.precision or parent.precision
        if phase.rope_theta is not None:
            model = model.model_copy(update={"rope_theta": phase.rope_theta})
        if isinstance(stage, MixtureTraining) and "goldfish" not in stage.model_fields_set:
            goldfish = parent.goldfish
        packing = packing or parent.packing
    else:
        assert phase.model is not None and stage.sequence_length is not None
        model, length, precision = phase.model, stage.sequence_length, stage.precision or Precision()
    optimizer = stage.optimizer.resolved(inherited, (*at, "optimizer"))
    assert optimizer.lr is not None
    batches, begins, budget = _filled(phase, start, parent)
    pieces = batch_pieces(at, batches, length)
    total, leftover = whole_budget((*at, "budget"), budget, pieces, length)
    mixtures = annealed_pieces(at, mixture_pieces(at, begins, pieces, length), annealed, pieces, length, total)
    borders = {begin for begin, _ in pieces} | {begin for begin, _ in mixtures} | {total}
    if isinstance(stage.schedule, ScheduleSpec):
        full = full_schedule(at, stage.schedule, budget, optimizer.lr, pieces, length)
        # a decay over the whole stage leaves nothing that could stand alone
        cut = full.decay != "none" and stage.schedule.decay_over is not None
    else:
        assert start is not None and parent is not None
        done = parent.schedule.offset + parent.tokens_at(start.step)
        full = parent.schedule.model_copy(update={"peak": optimizer.lr, "offset": done})
        cut = full.decay_start > done
    if cut:
        borders.add(whole_batches((full.decay_start - full.offset) // length, pieces))
    stated = [*(pieces if stage.global_batch_size != REST else ()), *(mixtures if stage.data != REST else ())]
    for begin, _ in stated:
        if begin >= total:
            message = f"a border at {begin * length:,} tokens lies behind the end of the stage at {total * length:,} tokens"
            raise SpecError([Problem((*at, "budget"), message, "raise the budget or remove the border.")])
    planned: list[SegmentPlan] = []
    ordered = sorted(border for border in borders if border <= total)
    for begin, end in pairwise(ordered):
        batch = next(value for border, value in reversed(pieces) if border <= begin)
        mixture = next(value for border, value in reversed(mixtures) if border <= begin)
        schedule = seen_within(full, begin * length, end * length)
        planned.append(SegmentPlan(mixture, batch, begin, end, planned[-1].end_step if planned else 0, schedule))
    check_steps(at, stage, planned[-1].end_step)
    stop = whole_budget((*at, "stop_at"), stage.stop_at, pieces, length)[0] if stage.stop_at else total
    if stop > total:
        message = f"{stage.stop_at} is after the end of the stage at {total * length:,} tokens"
        raise SpecError([Problem((*at, "stop_at"), message, "lower it, or raise the budget.")])
    return Trajectory(
        stage=phase.stage,
        model=model,
        seed=phase.seed,
        sequence_length=length,
        optimizer=optimizer,
        precision=precision,
        goldfish=goldfish,
        packing=packing or "concatenate",
        carry=phase.carry,
        parent=start,
        segments=tuple(replace(one, end_sample=min(one.end_sample, stop)) for one in planned if one.start_sample < stop),
        planned=tuple(planned),
        schedule=full,
        leftover_tokens=leftover if stop == total else 0,
        context_length=max(length, found[start.phase].context_length) if start is not None else length,
        chat=phase.chat or (start is not None and found[start.phase].chat),
    )
