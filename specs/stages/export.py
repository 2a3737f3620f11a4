"""The `export` stage: a Hugging Face folder, verified against the trained model."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import ByteSize

from specs.base import Spec, execution, identity
from specs.model import ModelSpec
from specs.stages.base import FromCheckpoint


class ExportStage(FromCheckpoint):
    """Writes `ApertusForCausalLM` as safetensors, with config, generation config and tokenizer."""

    VERSION: ClassVar[int] = 1
    kind: Literal["export"] = identity()
    max_shard_size: ByteSize = identity(ByteSize(5_000_000_000), validate_default=True)
    tolerance: float = identity(
        1e-4, gt=0, description="largest allowed difference of logits, float32, between the folder and the trained model"
    )


class ExportPart(Spec):
    """Resolved. Inputs: `checkpoint`, `tokenizer`."""

    model: ModelSpec = identity()
    sequence_length: int = identity(description="max_position_embeddings of the exported config")
    max_shard_size: int = identity()
    tolerance: float = identity()
    attention: str = execution("auto")
