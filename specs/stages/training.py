"""What all stages that train share: the stage as written, and the *segment*, as the engine runs it.

Mixture, batch size and learning rate are piecewise functions of what the stage has consumed. Their borders cut the stage into segments;
inside a segment, mixture and batch are constant. A segment's fingerprint leaves out where it ends: it names a trajectory, and a
checkpoint is a trajectory and a step. So a longer budget continues, and an edit behind a border reruns nothing before it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from specs.base import Spec, execution, identity, reference
from specs.launch import Checkpointing, Parallel, Validation
from specs.model import ModelSpec
from specs.optimizer import OptimizerSpec
from specs.schedule import Schedule, ScheduleSpec
from specs.stages.base import Stage
from specs.units import Budget, ReferenceText

Carry = Literal["weights", "optimizer", "data"]


class Goldfish(Spec):
    """Goldfish loss (arXiv 2406.10209): a label is dropped when the hash of the `h` labels up to it falls into 1/k of the table."""

    k: int = identity(50, ge=2)
    h: int = identity(50, ge=1)


class Precision(Spec):
    """`param`: data type of forward and backward. Weights, gradient reduction and optimizer states are float32."""

    param: Literal["float32", "bfloat16"] = identity("bfloat16")


def _piecewise(value: Any) -> Any:
    return value if isinstance(value, dict) else {"0 tokens": value}


class TrainingStage(Stage):
    """Fields of `pretrain`, `cooldown` and the later kinds. In a stage with a parent, length, batch, optimizer, Goldfish and precision are
    the parent's where they are left out."""

    mixture: Annotated[dict[str, ReferenceText], BeforeValidator(_piecewise, json_schema_input_type=str | dict[str, str])] = reference(
        description="a mixture, or a map from the point where it begins to the mixture: {0 tokens: main, 7.038T tokens: second}"
    )
    global_batch_size: Annotated[dict[str, int], BeforeValidator(_piecewise, json_schema_input_type=int | dict[str, int])] | None = (
        reference(
            None, description="sequences per step, or a map from the point where it begins: {0 samples: 1024, 1_718_272_000 samples: 2048}"
        )
    )
    budget: Budget = reference(description="how long the stage trains; floored to whole batches")
    sequence_length: int | None = identity(None, ge=8)
    optimizer: OptimizerSpec = identity(default_factory=OptimizerSpec)
    schedule: ScheduleSpec = identity(default_factory=ScheduleSpec)
    goldfish: Goldfish | None = identity(default_factory=Goldfish)
    precision: Precision | None = identity(None)
    micro_batch_size: int | None = execution(
        None, ge=1, description="sequences per forward pass and data-parallel rank, at most; all of them by default"
    )
    attention: Literal["auto", "sdpa", "flex", "varlen", "flash"] = execution("auto")
    activation_checkpointing: Literal["none", "full"] = execution("none")
    compile: bool = execution(False)
    checkpoint: Checkpointing = execution(default_factory=Checkpointing)
    validation: Validation = execution(default_factory=Validation)


class Segment(Spec):
    """Resolved: one chained piece of a training stage. Inputs: `mixture`, `tokenizer`, and `parent` (a checkpoint) unless it
    starts from new weights. Steps and tokens count within the stage."""

    model: ModelSpec = identity()
    seed: int | None = identity(None, neutral=None, description="of the initial weights; None with a parent")
    sequence_length: int = identity()
    global_batch_size: int = identity()
    sample_offset: int = identity(0, neutral=0, description="samples of the mixture already drawn when the segment begins")
    start_step: int = identity(0, neutral=0)
    start_tokens: int = identity(0, neutral=0)
    carry: list[Carry] = identity(default_factory=list)
    optimizer: OptimizerSpec = identity()
    schedule: Schedule = identity()
    goldfish: Goldfish | None = identity(None, neutral=None)
    precision: Precision = identity(default_factory=Precision)

    end_step: int = execution(ge=1)
    micro_batch_size: int | None = execution(None)
    attention: str = execution("auto")
    activation_checkpointing: str = execution("none")
    compile: bool = execution(False)
    checkpoint: Checkpointing = execution(default_factory=Checkpointing)
    validation: Validation = execution(default_factory=Validation)
    source_names: list[str] = execution(default_factory=list, description="names of the mixture's sources, for the metrics")
    parallel: Parallel = execution(default_factory=Parallel)

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.sequence_length

    def tokens_at(self, step: int) -> int:
        """Tokens the stage has consumed when `step` steps are done."""
        return self.start_tokens + (step - self.start_step) * self.tokens_per_step

    def sample_at(self, step: int) -> int:
        """Index, in the mixture, of the first sample of step `step + 1`."""
        return self.sample_offset + (step - self.start_step) * self.global_batch_size
