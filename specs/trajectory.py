"""Trajectories: training stages with whole steps and every setting resolved, and the points on them that
references name. `specs.resolution` makes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from specs.base import flatten
from specs.differences import changes
from specs.errors import FieldPath, SpecError
from specs.foreign import shown
from specs.model import ModelSpec
from specs.optimizer import OptimizerSpec
from specs.schedule import Schedule
from specs.settings import Carry, Goldfish, Phase, Settings
from specs.stages.select import SelectStage
from specs.units import Reference

if TYPE_CHECKING:
    from specs.pipeline import Pipeline


@dataclass(frozen=True)
class SegmentPlan:
    """A segment: constant mixture and batch. Samples and steps count within the phase."""

    mixture: str  # name; a piece of an annealed mixture is named `mixture/1`
    batch: int  # sequences per step
    start_sample: int  # the first sample
    end_sample: int  # one after the last sample
    start_step: int  # steps done before the segment
    schedule: Schedule  # the part of the whole schedule that the segment sees

    @property
    def steps(self) -> int:
        return (self.end_sample - self.start_sample) // self.batch

    @property
    def end_step(self) -> int:
        return self.start_step + self.steps


@dataclass(frozen=True)
class Point:
    """The point where a phase starts."""

    phase: str  # name of the phase that it starts from
    segment: int  # index of the segment of that phase
    step: int  # steps done in that phase


Origin = Literal["training", "merge", "rewrite", "import"]
"""What made the checkpoints of a trajectory. `rewrite`: another order of a checkpoint's layers, or another
attention. `import`: a Hugging Face model, which has weights only."""


@dataclass(frozen=True)
class Trajectory:
    """A phase of a training stage with every setting resolved.

    Merges, rewrites and Hugging Face models are trajectories of one step that trains nothing. A selection is
    the trajectory of the checkpoint that it chose."""

    stage: str
    model: ModelSpec
    seed: int | None  # of new weights; None with a parent
    settings: Settings
    carry: tuple[Carry, ...]  # what is taken over from the parent
    parent: Point | None  # None: begins with new weights
    segments: tuple[SegmentPlan, ...]  # those up to `stop_at`
    planned: tuple[SegmentPlan, ...]  # those of the whole budget
    schedule: Schedule  # of the whole budget
    leftover_tokens: int  # tokens of the budget that do not make a whole batch
    context_length: int  # longest sequences that the model was trained on, here or before
    chat: bool = False  # whether the model ends its turns
    origin: Origin = "training"
    stands_for: Point | None = None  # of a selection: the checkpoint that it chose

    @property
    def trains(self) -> bool:
        """Whether the trajectory is a phase of training, and not a checkpoint of another trajectory."""
        return self.origin == "training" and self.stands_for is None

    @property
    def steps(self) -> int:
        return self.segments[-1].end_step

    @property
    def tokens(self) -> int:
        return self.segments[-1].end_sample * self.settings.sequence_length

    @property
    def planned_tokens(self) -> int:
        return self.planned[-1].end_sample * self.settings.sequence_length

    def tokens_at(self, step: int) -> int:
        """Tokens consumed by the phase after `step` steps."""
        segment = self.segments[self.segment_of(step)]
        sample = segment.start_sample + (step - segment.start_step) * segment.batch
        return sample * self.settings.sequence_length

    def segment_of(self, step: int) -> int:
        """The index of the segment that trains `step`; the first one for step 0."""
        return next(index for index, segment in enumerate(self.segments) if step <= segment.end_step)

    def lr_at(self, step: int) -> float:
        """The learning rate of the step after `step`, even if the phase ends before it."""
        schedule = self.segments[self.segment_of(step)].schedule
        return (self.settings.optimizer.lr or 0.0) * schedule.factor(self.tokens_at(step))


Trajectories = dict[str, Trajectory]  # by phase
# `@best:` reference -> the step that it means; name of a selection -> index of the candidate that it chose
Best = Mapping[str, int]


def phases(pipeline: Pipeline, name: str) -> list[Phase]:
    """The phases of a stage; empty for a stage that does not train, or does not exist."""
    stage = pipeline.stages.get(name)
    return [] if stage is None else stage.phases(name)


def imported(reference: str, model: ModelSpec, *, context: int, chat: bool) -> Trajectory:
    """The trajectory of a Hugging Face model, from which stages can start. `reference`: with `hf:`;
    `context`: its longest sequences, in tokens."""
    still = SegmentPlan("", 1, 0, 1, 0, Schedule())
    return Trajectory(
        stage=reference,
        model=model,
        seed=None,
        settings=Settings(sequence_length=context, optimizer=OptimizerSpec(), goldfish=Goldfish()),
        carry=(),
        parent=None,
        segments=(still,),
        planned=(still,),
        schedule=still.schedule,
        leftover_tokens=0,
        context_length=context,
        chat=chat,
        origin="import",
    )


def different_fields(a: ModelSpec, b: ModelSpec) -> str:
    """The fields in which two models differ, each with both values: `n_layers (8, 12)`; "" for none."""
    differing = changes(flatten(a.identity_fields()), flatten(b.identity_fields()))
    of_a, of_b = flatten(a.to_json()), flatten(b.to_json())
    return ", ".join(
        f"{field.name} ({shown(of_a.get(field.name))}, {shown(of_b.get(field.name))})" for field in differing
    )


def phase_of(ref: Reference, trajectories: Mapping[str, Trajectory]) -> str:
    """The name of the phase that a reference means: the phase that it names, or the last one of the stage.
    The stage's own name if there is no such phase."""
    if ref.part is not None:
        return f"{ref.stage}/{ref.part}"
    phases = (phase for phase in reversed(list(trajectories)) if trajectories[phase].stage == ref.stage)
    return next(phases, ref.stage)


def point_of(
    ref: Reference, parents: Mapping[str, Trajectory], path: FieldPath, best: Best | None = None
) -> Point:
    """The step that a reference names. Raises SpecError if the phase does not reach it."""
    phase = phase_of(ref, parents)
    parent = parents[phase]
    if parent.stands_for is not None:
        if (ref.step, ref.tokens, ref.best) != (None, None, None):
            message = f"'{ref}' names a step, and '{phase}' is one checkpoint"
            raise SpecError.of(path, message, f"name '{phase}' alone.")
        return parent.stands_for
    step = (best or {}).get(str(ref), parent.steps)
    if ref.step is not None:
        step = ref.step
    elif ref.tokens is not None:
        sample = ref.tokens // parent.settings.sequence_length
        inside = [segment for segment in parent.segments if segment.start_sample <= sample][-1]
        step = inside.start_step + min((sample - inside.start_sample) // inside.batch, inside.steps)
    if not 0 < step <= parent.steps or (ref.tokens or 0) > parent.tokens:
        has = f"{parent.steps} steps ({parent.tokens:,} tokens)"
        message = f"'{ref}' is outside stage '{phase}', which has {has}"
        raise SpecError.of(path, message, "name a step inside it, or raise its budget.")
    return Point(phase, parent.segment_of(step), step)


def candidates(pipeline: Pipeline, name: str) -> list[tuple[FieldPath, Reference]]:
    """The checkpoints that a selection chooses among, each with the path of the field that names it. Invalid
    evaluations are left out."""
    stage, among = cast(SelectStage, pipeline.stages[name]), list[tuple[FieldPath, Reference]]()
    among += [(("stages", name, "checkpoints", index), ref) for index, ref in enumerate(stage.checkpoints)]
    for ref in stage.evaluations:
        evaluation = pipeline.stages.get(ref.stage)
        if evaluation is not None and evaluation.read_model is not None:
            among.append((("stages", ref.stage, "from"), evaluation.read_model))
    return among
