"""The `merge` stage: a weighted average of checkpoints."""

from __future__ import annotations

from math import inf
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from specs.base import identity, reference
from specs.model import ModelSpec
from specs.stages.base import Part, Stage
from specs.units import Reference


class MergeStage(Stage):
    """Averages the weights of checkpoints, parameter by parameter: those of one trajectory, or of variants of
    a stage. The result has no optimizer states."""

    VERSION: ClassVar[int] = 1
    RESULT: ClassVar[str] = "checkpoint"
    kind: Literal["merge"] = identity()
    checkpoints: list[Reference] = reference(min_length=2, to="checkpoint")
    weights: list[Annotated[float, Field(ge=0)]] | None = reference(
        None, description="one per checkpoint; equal by default; only their ratios matter"
    )

    @model_validator(mode="after")
    def _one_weight_each(self) -> MergeStage:
        if self.weights is not None and len(self.weights) != len(self.checkpoints):
            raise ValueError(
                f"{len(self.weights)} weights for {len(self.checkpoints)} checkpoints; state one for each"
            )
        if self.weights is not None and not 0 < sum(self.weights) < inf:
            raise ValueError("weights must not all be zero, and their sum must be finite")
        return self


class MergePart(Part):
    """Resolved. Inputs: `checkpoint:<i>` in the order of their fingerprints, `tokenizer`. The result is
    checkpoint 1 of its artifact."""

    ON_ENGINE: ClassVar[bool] = True

    model: ModelSpec = identity()
    weights: list[float] = identity(description="in the order of the inputs")
