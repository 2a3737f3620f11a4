"""The `export` stage: a Hugging Face folder, verified against the trained model."""

from typing import ClassVar, Literal

from pydantic import ByteSize

from specs.base import execution, identity, option, reference
from specs.model import ModelSpec
from specs.stages.base import FromCheckpoint, Part
from specs.units import Reference


class ExportStage(FromCheckpoint):
    """Writes `ApertusForCausalLM` as safetensors, with config, generation config, tokenizer, chat
    template, and a model card made from the lineage.

    A reward model is opened by `AutoModelForSequenceClassification` with `trust_remote_code`: transformers
    has no such class for Apertus, so the folder brings it. transformers' own `ApertusForTokenClassification`
    of one output opens the same folder without code; the reward is then the output at the last token."""

    VERSION: ClassVar[int] = 5
    kind: Literal["export"] = identity()
    from_: Reference = reference(alias="from", to=("checkpoint", "reward_model"))
    max_shard_size: ByteSize = identity(ByteSize(5_000_000_000), gt=0, validate_default=True)
    dtype: Literal["float32", "bfloat16"] = option(
        "float32",
        description="dtype of the stored weights; training keeps float32, the released models are bfloat16",
    )
    tolerance: float = identity(
        1e-4,
        gt=0,
        description="largest allowed difference of logits, float32, between the folder and the trained model",
    )
    evaluations: list[Reference] = reference(
        default_factory=list,
        to="evaluate",
        description="evaluate stages whose results the model card shows",
    )


class ExportPart(Part):
    """The resolved export. Inputs: `checkpoint`, `tokenizer`, and `evaluation:<i>` for the model card."""

    model: ModelSpec = identity()
    sequence_length: int = identity(description="max_position_embeddings of the exported config")
    max_shard_size: int = identity()
    dtype: Literal["float32", "bfloat16"] = option("float32")
    tolerance: float = identity()
    chat: bool = option(False, description="the model ends its turns with the end-of-turn token")
    attention: str = execution("auto")
