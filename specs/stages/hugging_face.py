"""The parts of a Hugging Face folder (`hf:...`). No recipe names them: the planner adds the one that a stage
needs."""

from typing import ClassVar, Literal

from specs.base import execution, identity
from specs.model import ModelSpec
from specs.stages.base import Part


class ImportModelPart(Part):
    """The resolved import. Inputs: `folder` (config.json and safetensors). The result is checkpoint 1 of its
    artifact: weights without optimizer states, which stages read like a trained checkpoint."""

    VERSION: ClassVar[int] = 1
    model: ModelSpec = identity()
    url: str = execution(description="URL of the folder")
    reference: str = execution(description="reference as in the recipe, without hf:")
    chat: bool = execution(False, description="whether the model ends its turns with the end-of-turn token")
    license: str = execution("", description="license from the folder's model card")
    language: str = execution("")


class ModelFolderPart(Part):
    """The resolved folder of any architecture, kept as it is for a stage that samples from the model or runs
    tasks on it. Inputs: `folder` (config, weights, tokenizer, chat template), whose contents are its
    identity. Like an export, the artifact is a folder that transformers and vLLM open."""

    VERSION: ClassVar[int] = 1
    url: str = execution(description="URL of the folder")
    files: list[str] = execution(description="files by their names in the folder")
    reference: str = execution(description="reference as in the recipe, without hf:")
    weight_bytes: int = execution(0, description="size of the weights as stored")
    shape: ModelSpec | None = execution(
        None, description="dimensions of the model, where they are known; for plans"
    )
    dtype: Literal["float32", "bfloat16"] = execution(
        "bfloat16", description="dtype of the weights as stored"
    )
    license: str = execution("", description="license from the folder's model card")
    language: str = execution("")
