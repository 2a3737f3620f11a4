"""The base of all training stages: the stage as written, and the *segment*, as the engine runs it.

Mixture, batch size and learning rate are piecewise functions of consumed tokens. Their breakpoints split the
stage into segments; inside a segment, mixture and batch are constant. A segment's fingerprint leaves out its
end: it names a trajectory, and a checkpoint is a trajectory and a step. So a longer budget continues the
training, and an edit after a breakpoint reruns nothing before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator

from specs.anomalies import Anomalies
from specs.base import Spec, execution, identity, reference
from specs.errors import FieldPath
from specs.launch import Checkpointing, Parallel, Validation
from specs.mamba import NewMixers
from specs.model import ModelSpec
from specs.optimizer import OptimizerSpec
from specs.schedule import Schedule, ScheduleSpec
from specs.stages.base import FromCheckpoint, Part, Stage
from specs.units import Budget, OrRest, Reference, ReferenceText, Rest

Carry = Literal["weights", "optimizer", "data"]
Packing = Literal["concatenate", "best-fit"]
"""How documents become sequences: end to end, or whole."""
AnyPacking = Literal["concatenate", "best-fit", "none"]
"""How documents or conversations become sequences: `none` is one to a sequence."""


class Goldfish(Spec):
    """Goldfish loss (arXiv 2406.10209): a label is dropped when the hash of the `h` labels up to it falls
    into 1/k of the table."""

    k: int = identity(50, ge=2, le=2**24)
    h: int = identity(50, ge=1, le=2**16)
    within_documents: bool = identity(
        False,
        neutral=False,
        description=(
            "hashes labels of one document at a time, so the first h - 1 labels of each are always trained; "
            "the Apertus runs hashed across the boundaries of packed documents"
        ),
    )


class Precision(Spec):
    """The dtypes of training. Weights and gradient reduction are float32; so are optimizer states, unless
    `optimizer.state_dtype` says otherwise."""

    param: Literal["float32", "bfloat16"] = identity("bfloat16", description="dtype of forward and backward")
    linear: Literal["param", "float8", "float8-rowwise"] = identity(
        "param",
        neutral="param",
        description=(
            "operands of the layers' matrix products, not of embeddings and output; float8: one scale per"
            " tensor, float8-rowwise: one per row. Products of a GPU from the H100 on; emulated, and slow,"
            " without a GPU"
        ),
    )


def _piecewise(value: Any) -> Any:
    return value if isinstance(value, dict) else {"0 tokens": value}


Batches = Annotated[dict[str, int], BeforeValidator(_piecewise, json_schema_input_type=int | dict[str, int])]
Mixtures = Annotated[
    dict[str, ReferenceText], BeforeValidator(_piecewise, json_schema_input_type=str | dict[str, str])
]


class Training(Spec):
    """Settings of training on one kind of data. In a stage with a parent, length, batch, optimizer and
    precision default to the parent's. `rest of parent` is what the parent would have done after the
    checkpoint that the stage starts from."""

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
    trainable: list[str] = identity(
        default_factory=list,
        neutral=[],
        description=(
            "patterns of parameters' names, such as layers.[2-5].* or lm_head.weight. Only these are trained"
            " in this stage, and only they have optimizer states; all by default"
        ),
    )
    anomalies: Anomalies = identity(default_factory=Anomalies, neutral=Anomalies())
    deterministic: bool = identity(
        True,
        neutral=True,
        description=(
            "whether only algorithms with one result are used; false: also faster ones of the GPU, whose"
            " sums depend on timing, so a resumed run no longer has the bits of an uninterrupted one"
        ),
    )
    micro_batch_size: int | None = execution(
        None,
        ge=1,
        description="maximum number of sequences per forward pass and data-parallel rank; all by default",
    )
    attention: Literal["auto", "sdpa", "flex", "varlen", "flash"] = execution("auto")
    activation_checkpointing: Literal["none", "selective", "full", "memory_budget"] = execution(
        "none",
        description=(
            "recomputation of a layer in the backward pass; full: all of it, selective: half of its matrix"
            " products, memory_budget: what the compiler chooses, so that `memory_budget` suffices"
        ),
    )
    memory_budget: float = execution(
        0.5,
        ge=0,
        le=1,
        description=(
            "with activation_checkpointing: memory_budget: the share of a layer's activations that is kept,"
            " between what full recomputation keeps (0) and what none does (1)"
        ),
    )
    compile: bool = execution(False)
    checkpoint: Checkpointing = execution(default_factory=Checkpointing)
    validation: Validation = execution(default_factory=Validation)
    norms_interval: int = execution(
        100,
        ge=0,
        description=(
            "steps between two rows with the norms of weights and optimizer states by layer; a segment's last"
            " step has one too; 0: none"
        ),
    )

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
    settings: Training  # as stated
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
    CHAT: ClassVar[bool] = False  # whether its model ends a turn, instead of a document

    @classmethod
    def segment(cls) -> type[Segment]:
        """The class of its parts."""
        return Segment

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


class Segment(Part):
    """A resolved segment of a phase. Inputs: `mixture`, `tokenizer`, and `parent` (a checkpoint) unless it
    starts from new weights; `packed:<i>` of each source of the mixture for best-fit packing; the mixtures
    `excluded:<i>`. Kinds that do not train on a mixture name other inputs. Steps and tokens count within the
    phase."""

    ON_ENGINE: ClassVar[bool] = True

    model: ModelSpec = identity()
    seed: int | None = identity(
        None, neutral=None, description="seed of new weights; None where all weights are a parent's"
    )
    sequence_length: int = identity()
    global_batch_size: int = identity()
    sample_offset: int = identity(
        0, neutral=0, description="samples of the mixture already drawn when the segment begins"
    )
    start_step: int = identity(0, neutral=0)
    start_tokens: int = identity(0, neutral=0)
    carry: list[Carry] = identity(default_factory=list)
    optimizer: OptimizerSpec = identity()
    schedule: Schedule = identity()
    excluded: list[int] = identity(
        default_factory=list,
        neutral=[],
        description="samples already drawn through the mixtures `excluded:<i>`",
    )
    goldfish: Goldfish | None = identity(None, neutral=None)
    z_loss: float = identity(0.0, neutral=0.0)
    packing: AnyPacking = identity("concatenate", neutral="concatenate")
    precision: Precision = identity(default_factory=Precision)
    trainable: list[str] = identity(default_factory=list, neutral=[], description="sorted")
    anomalies: Anomalies = identity(default_factory=Anomalies, neutral=Anomalies())
    deterministic: bool = identity(True, neutral=True)

    end_step: int = execution(ge=1)
    micro_batch_size: int | None = execution(None)
    attention: str = execution("auto")
    activation_checkpointing: str = execution("none")
    memory_budget: float = execution(0.5)
    compile: bool = execution(False)
    checkpoint: Checkpointing = execution(default_factory=Checkpointing)
    validation: Validation = execution(default_factory=Validation)
    norms_interval: int = execution(100)
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

    def tokens_at(self, step: int) -> int:
        """Tokens that the stage has consumed after `step` steps."""
        return self.start_tokens + (step - self.start_step) * self.tokens_per_step

    def sample_at(self, step: int) -> int:
        """Index, in the mixture, of the first sample of step `step + 1`."""
        return self.sample_offset + (step - self.start_step) * self.global_batch_size
