"""The settings of training, as they are resolved for a phase.

A stage states the settings of a `Training`. Those of `PhaseSettings` are taken as they are; the others, where
a stage leaves them out, are the parent's (`specs.resolution.settings_of`). The result is one `Settings` for
the phase, which its trajectory holds, and each of its segments has.
"""

from __future__ import annotations

from typing import Literal

from specs.anomalies import Anomalies
from specs.base import Spec, execution, identity
from specs.launch import Checkpointing, Validation
from specs.optimizer import OptimizerSpec

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


Recomputation = Literal["none", "selective", "full", "memory_budget"]


class PhaseSettings(Spec):
    """The settings of one phase, which no other phase inherits."""

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
    activation_checkpointing: Recomputation = execution(
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


class Settings(PhaseSettings):
    """The resolved settings of a phase."""

    sequence_length: int = identity()
    optimizer: OptimizerSpec = identity()
    precision: Precision = identity(default_factory=Precision)
    goldfish: Goldfish | None = identity(None, neutral=None)
    z_loss: float = identity(0.0, neutral=0.0)
    packing: AnyPacking = identity("concatenate", neutral="concatenate")
