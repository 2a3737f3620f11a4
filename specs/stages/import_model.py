"""The part that turns a Hugging Face folder (`from: hf:...`) into a checkpoint. No recipe names it: the planner adds it to a stage."""

from __future__ import annotations

from typing import ClassVar

from specs.base import execution, identity
from specs.model import ModelSpec
from specs.stages.base import Part


class ImportModelPart(Part):
    """Resolved. Inputs: `folder` (config.json and safetensors). The result is checkpoint 1 of its artifact: weights without optimizer
    states, so any stage reads it as it reads a trained one."""

    VERSION: ClassVar[int] = 1
    model: ModelSpec = identity()
    url: str = execution(description="of the folder")
    reference: str = execution(description="as it stands in the recipe, without hf:")
    chat: bool = execution(False, description="the model ends its turns")
    license: str = execution("", description="as the model card of the folder states it")
    language: str = execution("")
