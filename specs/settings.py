"""The settings of training, as they are resolved for a phase.

A stage states the settings of a `Training`. Those of `PhaseSettings` are taken as they are; the others, where
a stage leaves them out, are the parent's (`specs.resolution.settings_of`). The result is one `Settings` for
the phase, which its trajectory holds, and each of its segments has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from specs.anomalies import Anomalies
from specs.base import Spec, execution, identity, option, reference
from specs.errors import FieldPath
from specs.launch import Checkpointing, Validation
from specs.mamba import NewMixers
from specs.model import ModelSpec
from specs.optimizer import OptimizerSpec
from specs.schedule import ScheduleSpec
from specs.units import Budget, OrRest, Reference, ReferenceText, Rest

Packing = Literal["concatenate", "best-fit"]
"""How documents become sequences: end to end, or whole."""
AnyPacking = Literal["concatenate", "best-fit", "none"]
"""How documents or conversations become sequences: `none` is one to a sequence."""


class Goldfish(Spec):
    """Goldfish loss (arXiv 2406.10209): a label is dropped when the hash of the `h` labels up to it falls
    into 1/k of the table."""

    k: int = identity(50, ge=2, le=2**24)
    h: int = identity(50, ge=1, le=2**16)
    within_documents: bool = option(
        False,
        description="hashes labels of one document at a time, so the first h - 1 labels of each are always"
        " trained; the Apertus runs hashed across the boundaries of packed documents",
    )


class Precision(Spec):
    """The dtypes of training. Weights and gradient reduction are float32; so are optimizer states, unless
    `optimizer.state_dtype` says otherwise."""

    param: Literal["float32", "bfloat16"] = identity("bfloat16", description="dtype of forward and backward")
    linear: Literal["param", "float8", "float8-rowwise", "mxfp8"] = option(
        "param",
        description="operands of the layers' matrix products, not of embeddings and output; float8: one"
        " scale per tensor, float8-rowwise: one per row, mxfp8: one per 32 elements. Products of a GPU from"
        " the H100 on, mxfp8 from the B200 on; emulated, and slow, without a GPU",
    )


class Lora(Spec):
    """Low-rank adaptation (arXiv 2106.09685): `W + alpha / rank * B A`, of which only A and B are trained.
    The checkpoint holds W, A and B; a stage that starts from it reads the sum."""

    rank: int = identity(16, ge=1, le=2**16)
    alpha: float = identity(32.0, gt=0)
    targets: list[Literal["wq", "wk", "wv", "wo", "up_proj", "down_proj"]] = identity(
        default_factory=lambda: ["wq", "wk", "wv", "wo", "up_proj", "down_proj"], min_length=1
    )


Recomputation = Literal["none", "selective", "full", "memory_budget"]


class PhaseSettings(Spec):
    """The settings of one phase, which no other phase inherits."""

    trainable: list[str] = option(
        default_factory=list,
        description="patterns of parameters' names, such as layers.[2-5].* or lm_head.weight. Only these are"
        " trained in this stage, and only they have optimizer states; all by default",
    )
    anomalies: Anomalies = option(default_factory=Anomalies)
    deterministic: bool = option(
        True,
        description="whether only algorithms with one result are used; false: also faster ones of the GPU,"
        " whose sums depend on timing, so a resumed run no longer has the bits of an uninterrupted one",
    )
    micro_batch_size: int | None = execution(
        None,
        ge=1,
        description="maximum number of sequences per forward pass and data-parallel rank; all by default",
    )
    attention: Literal["auto", "sdpa", "flex", "varlen", "flash"] = execution("auto")
    activation_checkpointing: Recomputation = execution(
        "none",
        description="recomputation of a layer in the backward pass; full: all of it, selective: half of its"
        " matrix products, memory_budget: what the compiler chooses, so that `memory_budget` suffices",
    )
    memory_budget: float = execution(
        0.5,
        ge=0,
        le=1,
        description="with activation_checkpointing: memory_budget: the share of a layer's activations that"
        " is kept, between what full recomputation keeps (0) and what none does (1)",
    )
    compile: bool = execution(False)
    checkpoint: Checkpointing = execution(default_factory=Checkpointing)
    validation: Validation = execution(default_factory=Validation)
    norms_interval: int = execution(
        100,
        ge=0,
        description="steps between two rows with the norms of weights and optimizer states by layer; a"
        " segment's last step has one too; 0: none",
    )


class Settings(PhaseSettings):
    """The resolved settings of a phase."""

    sequence_length: int = identity()
    optimizer: OptimizerSpec = identity()
    precision: Precision = identity(default_factory=Precision)
    goldfish: Goldfish | None = option(None)
    z_loss: float = option(0.0)
    packing: AnyPacking = option("concatenate")


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
        description="sequences per step, or a map from breakpoints: {0 samples: 1024, 1_718_272_000 samples:"
        " 2048}; or `rest of parent`",
    )
    budget: OrRest[Budget] = reference(
        description="length of the training, floored to whole batches; or `rest of parent`"
    )
    stop_at: Budget | None = reference(
        None,
        description="training stops here; the schedule, and the `rest of parent` for another stage, stay"
        " those of the whole budget",
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

    def stated_settings(self) -> dict[str, Any]:
        """The settings of the phase, as stated or by default; None where the parent decides."""
        return self._settings_in(Training)

    def _settings_in(self, declaring: type[Training]) -> dict[str, Any]:
        """The values of the settings that a class declares: a kind may have fields of these names for its
        own data."""
        names = declaring.model_fields.keys() & Settings.model_fields.keys()
        return {name: getattr(self, name) for name in names}

    def inherited(self, parent: Settings) -> Settings:
        """The settings of the parent, as far as this kind of training inherits them."""
        return parent.model_copy(update={"goldfish": None})

    @property
    def adapters(self) -> Lora | None:
        """The adapters that are trained in place of the model's parameters."""
        return None

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
        description="a mixture, or a map from breakpoints: {0 tokens: main, 7.038T tokens: second}; or `rest"
        " of parent`",
    )
    goldfish: Goldfish | None = identity(default_factory=Goldfish)
    z_loss: float | None = option(
        None,
        ge=0,
        le=1,
        description="weight of the mean of (ln Z)^2, Z the sum of a token's exp(logit), which keeps logits"
        " small (1e-4 in arXiv 2204.02311); it is part of training losses, not of held-out ones; 0: off",
    )
    packing: Packing | None = option(
        None,
        description="concatenate (the default): documents one after the other, cut where a sequence ends;"
        " best-fit: whole documents packed into sequences (arXiv 2404.10830), only longer ones are cut",
    )

    def stated_settings(self) -> dict[str, Any]:
        return self._settings_in(MixtureTraining)

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
