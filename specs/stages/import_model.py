"""The part that turns a Hugging Face folder (`from: hf:...`) into a checkpoint. No recipe names it: the
planner adds it to a stage."""

from __future__ import annotations

from typing import ClassVar

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
