"""The base of all training stages: the stage as written, and the *segment*, as the engine runs it.

Mixture, batch size and learning rate are piecewise functions of consumed tokens. Their breakpoints split the
stage into segments; inside a segment, mixture and batch are constant. A segment's fingerprint leaves out its
end: it names a trajectory, and a checkpoint is a trajectory and a step. So a longer budget continues the
training, and an edit after a breakpoint reruns nothing before it.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator

from specs.base import Spec, execution, identity, reference, role_of
from specs.errors import FieldPath
from specs.launch import Parallel
from specs.mamba import NewMixers
from specs.model import ModelSpec
from specs.optimizer import OptimizerSpec
from specs.schedule import Schedule, ScheduleSpec
from specs.settings import Goldfish, Packing, PhaseSettings, Precision, Settings
from specs.stages.base import FromCheckpoint, Part, Stage
from specs.units import Budget, OrRest, Reference, ReferenceText, Rest

Carry = Literal["weights", "optimizer", "data"]


def _piecewise(value: Any) -> Any:
    return value if isinstance(value, dict) else {"0 tokens": value}


Batches = Annotated[dict[str, int], BeforeValidator(_piecewise, json_schema_input_type=int | dict[str, int])]
Mixtures = Annotated[
    dict[str, ReferenceText], BeforeValidator(_piecewise, json_schema_input_type=str | dict[str, str])
]


class Stated(Spec):
    """What a stage states relative to its parent: length, batch, optimizer and precision default to the
    parent's, and `rest of parent` is what the parent would have done after the checkpoint that the stage
    starts from."""

    global_batch_size: OrRest[Batches | None] = reference(
        None,
        description=(
            "sequences per step, or a map from breakpoints: {0 samples: 1024, 1_718_272_000 samples: 2048};"
            " or `rest of parent`"
        ),
    )
    budget: OrRest[Budget] = reference(
        description="length of the training, floored to whole batches; or `rest of parent`"
    )
    stop_at: Budget | None = reference(
        None,
        description=(
            "training stops here; the schedule, and the `rest of parent` for another stage, stay those of "
            "the whole budget"
        ),
    )
    sequence_length: int | None = identity(None, ge=8)
    optimizer: OptimizerSpec = identity(default_factory=OptimizerSpec)
    schedule: OrRest[ScheduleSpec] = identity(
        default_factory=ScheduleSpec,
        description="schedule of the learning rate; `rest of parent` scales with optimizer.lr, its peak",
    )
    precision: Precision | None = identity(None)


class Training(PhaseSettings, Stated):
    """Settings of training on one kind of data, as stated."""

    def settings(self) -> dict[str, Any]:
        """The settings of the phase, as stated or by default; None where the parent decides."""
        return {name: getattr(self, name) for name in Training.model_fields if name in Settings.model_fields}

    def inherited(self, parent: Settings) -> Settings:
        """The settings of the parent, as far as this kind of training inherits them."""
        return parent.model_copy(update={"goldfish": None})

    def trained(self, model: ModelSpec, at: FieldPath) -> list[str]:
        """The patterns of the parameters that are trained; empty for all. `at`: the path of these settings,
        for errors."""
        return self.trainable

    @property
    def data(self) -> dict[str, str] | Rest:
        """The mixtures by breakpoint. Training without a mixture has one mixture with an empty name."""
        return {"0 tokens": ""}


class MixtureTraining(Training):
    """Training on text. Goldfish, z-loss and packing default to the parent's."""

    mixture: OrRest[Mixtures] = reference(
        to="mixture",
        description=(
            "a mixture, or a map from breakpoints: {0 tokens: main, 7.038T tokens: second}; or `rest of"
            " parent`"
        ),
    )
    goldfish: Goldfish | None = identity(default_factory=Goldfish)
    z_loss: float | None = identity(
        None,
        neutral=None,
        ge=0,
        le=1,
        description=(
            "weight of the mean of (ln Z)^2, Z the sum of a token's exp(logit), which keeps logits small"
            " (1e-4 in arXiv 2204.02311); it is part of training losses, not of held-out ones; 0: off"
        ),
    )
    packing: Packing | None = identity(
        None,
        neutral=None,
        description=(
            "concatenate (the default): documents one after the other, cut where a sequence ends; "
            "best-fit: whole documents packed into sequences (arXiv 2404.10830), only longer ones are cut"
        ),
    )

    def settings(self) -> dict[str, Any]:
        names = MixtureTraining.model_fields.keys() & Settings.model_fields.keys()
        return {name: getattr(self, name) for name in names}

    def inherited(self, parent: Settings) -> Settings:
        return parent

    @property
    def data(self) -> dict[str, str] | Rest:
        return self.mixture


@dataclass(frozen=True)
class Phase:
    """A piece of a stage with its own settings and parent. Most stages have one; `long_context` has one per
    step. Settings that are left out, rope_theta and head among them, are the parent's."""

    name: str  # the stage, or `stage/1`
    stage: str
    path: FieldPath  # of its fields
    training: Training  # as stated
    parent: Reference | None  # None: begins with new weights
    carry: tuple[Carry, ...] = ()
    model: ModelSpec | None = None
    seed: int | None = None
    rope_theta: float | None = None
    head: Literal["vocabulary", "reward"] | None = None
    mamba: NewMixers | None = None
    chat: bool = False


class TrainingStage(Stage):
    """A stage whose parts are segments of training."""

    RESULT: ClassVar[str] = "checkpoint"
    IN_LAYOUT: ClassVar[bool] = True
    # further inputs of its segments: by role, the field that names a part
    INPUTS: ClassVar[dict[str, str]] = {}
    CHAT: ClassVar[bool] = False  # whether its model ends a turn, instead of a document

    @classmethod
    def segment(cls) -> type[Segment]:
        """The class of its parts."""
        return Segment

    def segment_fields(self, settings: Settings) -> dict[str, Any]:
        """The fields of its segments that follow from the stage: the settings of the phase, and the fields of
        the kind, which have one name in stage and segment."""
        if self.trains_on != "mixture":  # the settings of text are those of stages that start from this one
            settings = settings.model_copy(update={"z_loss": 0.0, "packing": "concatenate"})
        kind = type(self)
        own = {
            name
            for base in self.segment().__mro__
            if not issubclass(Segment, base)
            for name in inspect.get_annotations(base)
        }
        taken = {name for name in own & kind.model_fields.keys() if role_of(kind, name) != "reference"}
        return dict(settings) | {name: getattr(self, name) for name in taken}

    @property
    def trains_on(self) -> str:
        """The kind of its data, which the planner resolves (`flows.planning.parts.training_data`)."""
        return "mixture"

    @property
    def objective(self) -> str:
        """The objective, which some optimizers cannot minimise (`specs.optimizer.refused_objective`)."""
        return "cross-entropy"

    def obstacle(self, to: Literal["pp", "tp", "cp", "float8"]) -> str:
        return ""

    def phases(self, name: str) -> list[Phase]:
        """The phases of the stage, called `name` in the recipe, in order."""
        raise TypeError(f"{type(self).__name__} states no phases")


def _with_weights(carry: list[Carry]) -> list[Carry]:
    if "weights" not in carry:
        raise ValueError("a stage that starts from a checkpoint carries its weights; add weights to carry")
    return carry


CarryField = Annotated[list[Carry], AfterValidator(_with_weights)]


def carries(*default: Carry) -> Any:
    """The `carry` field of a kind, with its default."""
    return identity(
        default_factory=lambda: list(default),
        description=(
            "what is taken over from the parent. weights: required; optimizer: its states; data: samples "
            "that were drawn from the same mixture are not drawn again"
        ),
    )


class FromParent(TrainingStage, FromCheckpoint):
    """A stage of one phase that begins with a checkpoint. Subclasses are `Training` as well."""

    carry: CarryField = carries("weights")

    def phases(self, name: str) -> list[Phase]:
        assert isinstance(self, Training)
        return [
            Phase(name, name, ("stages", name), self, self.from_, carry=tuple(self.carry), chat=self.CHAT)
        ]


class ForwardPart(Part):
    """A part of forward passes on the training engine."""

    ON_ENGINE: ClassVar[bool] = True
    model: ModelSpec = identity()
    sequence_length: int = identity()
    precision: Precision = identity(default_factory=Precision)
    attention: str = execution("auto")
    batch_size: int = execution(4, description="sequences per forward pass and data-parallel rank")
    parallel: Parallel = execution(default_factory=Parallel)


class Segment(Settings, Part):
    """A resolved segment of a phase. Inputs: `mixture`, `tokenizer`, and `parent` (a checkpoint) unless it
    starts from new weights; `packed:<i>` of each source of the mixture for best-fit packing; the mixtures
    `excluded:<i>`. Kinds that do not train on a mixture name other inputs. Steps and tokens count within the
    phase."""

    ON_ENGINE: ClassVar[bool] = True

    model: ModelSpec = identity()
    seed: int | None = identity(
        None, neutral=None, description="seed of new weights; None where all weights are a parent's"
    )
    global_batch_size: int = identity()
    sample_offset: int = identity(
        0, neutral=0, description="samples of the mixture already drawn when the segment begins"
    )
    start_step: int = identity(0, neutral=0)
    start_tokens: int = identity(0, neutral=0)
    carry: list[Carry] = identity(default_factory=list)
    schedule: Schedule = identity()
    excluded: list[int] = identity(
        default_factory=list,
        neutral=[],
        description="samples already drawn through the mixtures `excluded:<i>`",
    )
    end_step: int = execution(ge=1)
    source_names: list[str] = execution(
        default_factory=list, description="names of the mixture's sources, for the metrics"
    )
    parallel: Parallel = execution(default_factory=Parallel)

    @property
    def objective(self) -> str:
        """The name of the objective in the engine."""
        return "cross-entropy"

    @property
    def new_parameters(self) -> tuple[str, ...]:
        """The name patterns of the parameters, besides adapters and heads, that do not begin with those of
        `parent`."""
        return ()

    @property
    def separate_gradients(self) -> int:
        """The number of gradients that a step computes separately, each of equally many sequences of the
        batch, in order."""
        return 1

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.sequence_length

    def checkpoint_due(self, step: int) -> bool:
        """Whether a checkpoint is made at a step, regardless of time: by the settings, or for rollbacks."""
        return self.checkpoint.due(step) or (
            self.anomalies.rolls_back and step % self.anomalies.rollback_interval == 0
        )

    def lr_at(self, step: int) -> float:
        """The learning rate of the step after `step`."""
        assert self.optimizer.lr is not None, "the planner resolves the optimizer"
        return self.optimizer.lr * self.schedule.factor(self.tokens_at(step))

    def tokens_at(self, step: int) -> int:
        """Tokens that the stage has consumed after `step` steps."""
        return self.start_tokens + (step - self.start_step) * self.tokens_per_step

    def sample_at(self, step: int) -> int:
        """Index, in the mixture, of the first sample of step `step + 1`."""
        return self.sample_offset + (step - self.start_step) * self.global_batch_size
