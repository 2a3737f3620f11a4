"""The base of all training stages: the stage as written, and the *segment*, as the engine runs it.

Mixture, batch size and learning rate are piecewise functions of consumed tokens. Their breakpoints split the
stage into segments; inside a segment, mixture and batch are constant. A segment's fingerprint leaves out its
end: it names a trajectory, and a checkpoint is a trajectory and a step. So a longer budget continues the
training, and an edit after a breakpoint reruns nothing before it.
"""

import inspect
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator

from specs.base import execution, facts_of, identity, option
from specs.capabilities import OBJECTIVES
from specs.launch import Parallel
from specs.model import ModelSpec
from specs.schedule import Schedule
from specs.settings import Carry, Lora, Phase, Precision, Settings, Training
from specs.stages.base import FromCheckpoint, Part, Stage


class Segment(Settings, Part):
    """A resolved segment of a phase. Inputs: `mixture`, `tokenizer`, and `parent` (a checkpoint) unless it
    starts from new weights; `packed:<i>` of each source of the mixture for best-fit packing; the mixtures
    `excluded:<i>`. Kinds that do not train on a mixture name other inputs. Steps and tokens count within the
    phase."""

    ON_ENGINE: ClassVar[bool] = True
    OBJECTIVE: ClassVar[str] = "cross-entropy"  # its name in the engine
    # the class of its data: a name in `apertus_model.stages.training_data`, or `module:name`
    DATA_CLASS: ClassVar[str] = "MixtureData"

    model: ModelSpec = identity()
    seed: int | None = option(None, description="seed of new weights; None where all weights are a parent's")
    global_batch_size: int = identity()
    sample_offset: int = option(0, description="samples of the mixture already drawn when the segment begins")
    start_step: int = option(0)
    start_tokens: int = option(0)
    carry: list[Carry] = identity(default_factory=list)
    schedule: Schedule = identity()
    excluded: list[int] = option(
        default_factory=list, description="samples already drawn through the mixtures `excluded:<i>`"
    )
    end_step: int = execution(ge=1)
    source_names: list[str] = execution(
        default_factory=list, description="names of the mixture's sources, for the metrics"
    )
    parallel: Parallel = execution(default_factory=Parallel)

    @property
    def objective(self) -> str:
        return self.OBJECTIVE

    @property
    def data_class(self) -> str:
        return self.DATA_CLASS

    @property
    def adapters(self) -> Lora | None:
        """The adapters that are trained in place of the model's parameters."""
        return None

    @property
    def teacher_beside(self) -> ModelSpec | None:
        """The frozen teacher that runs beside the model."""
        return None

    @property
    def compared(self) -> Literal["matrix", "hidden"] | None:
        """What is compared of each mixer and its teacher's attention, where nothing else runs."""
        return None

    @property
    def stored_words(self) -> int:
        """The number of a teacher's words that are stored with each token."""
        return 0

    @property
    def weighted(self) -> list[int]:
        """The positions of the mixture's sources whose weights are learned."""
        return []

    @property
    def new_weights_seed(self) -> int:
        """The seed of the weights that come from no checkpoint."""
        return self.seed or 0

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


class TrainingStage(Stage):
    """A stage whose parts are segments of training."""

    RESULT: ClassVar[str] = "checkpoint"
    MEASURES_LOSS: ClassVar[bool] = True
    IN_LAYOUT: ClassVar[bool] = True
    # further inputs of its segments: by role, the field that names a part
    INPUTS: ClassVar[dict[str, str]] = {}
    SEGMENT: ClassVar[type[Segment]] = Segment
    TRAINS_ON: ClassVar[str] = "mixture"  # its data, resolved by `flows.planning.parts.training_data`
    CHAT: ClassVar[bool] = False  # whether its model ends a turn, instead of a document

    def segment_fields(self, settings: Settings) -> dict[str, Any]:
        """The fields of its segments that follow from the stage: the settings of the phase, and the fields of
        the kind, which have one name in stage and segment."""
        if self.trains_on != "mixture":  # the settings of text are those of stages that start from this one
            settings = settings.model_copy(update={"z_loss": 0.0, "packing": "concatenate"})
        kind = type(self)
        own = {
            name
            for base in self.SEGMENT.__mro__
            if not issubclass(Segment, base)
            for name in inspect.get_annotations(base)
        }
        common = {name for name in own & kind.model_fields.keys() if facts_of(kind, name).role != "reference"}
        return dict(settings) | {name: getattr(self, name) for name in common}

    @property
    def objective(self) -> str:
        return self.SEGMENT.OBJECTIVE

    @property
    def trains_on(self) -> str:
        return self.TRAINS_ON

    def obstacle(self, to: Literal["pp", "tp", "cp", "float8"]) -> str:
        return OBJECTIVES[self.objective].pipeline_obstacle if to == "pp" else ""


def _with_weights(carry: list[Carry]) -> list[Carry]:
    if "weights" not in carry:
        raise ValueError("a stage that starts from a checkpoint carries its weights; add weights to carry")
    return carry


CarryField = Annotated[list[Carry], AfterValidator(_with_weights)]


def carries(*default: Carry) -> Any:
    """The `carry` field of a kind, with its default."""
    return identity(
        default_factory=lambda: list(default),
        description="what is taken over from the parent. weights: required; optimizer: its states; data:"
        " samples that were drawn from the same mixture are not drawn again",
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


class PackingPart(Part):
    """The resolved packing of a corpus: a training stage with `packing: best-fit` has one per corpus. Input:
    `corpus`. The rows are a function of the documents and the sequence length alone."""

    PLAN_DEPENDS: ClassVar[bool] = True
    VERSION: ClassVar[int] = 1
    sequence_length: int = identity(ge=2)
