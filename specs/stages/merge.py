"""The `merge` stage: one model from the weights of several checkpoints, parameter by parameter."""

from collections.abc import Iterator
from math import inf
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from specs.base import Spec, identity, option, reference
from specs.model import ModelSpec
from specs.stages.base import Part, Stage
from specs.units import Reference


class MergeRule(Spec):
    """The rule by which parameters are merged."""

    method: Literal["average", "task-arithmetic", "ties"] = option(
        "average",
        description="average: weighted mean. task-arithmetic (arXiv 2212.04089): base + scale * sum of"
        " weight * (checkpoint - base). ties (arXiv 2306.01708): of each difference from base only the"
        " largest elements, and of these the weighted mean of those whose sign is that of their weighted sum",
    )
    scale: float = option(
        1.0, allow_inf_nan=False, description="scale of what is added to `base`: lambda in both papers"
    )
    density: float | None = option(
        None,
        gt=0,
        le=1,
        description="for ties: the kept share of each tensor's elements; 0.2 by default, as published",
    )

    def conflicts(self) -> Iterator[str]:
        if self.method == "average" and self.scale != 1.0:
            yield "an average has no scale; leave it out, or set method: task-arithmetic or ties"
        if self.method != "ties" and self.density is not None:
            yield f"density belongs to method: ties, and the method is {self.method}"

    @property
    def kept(self) -> float:
        """The share of the elements of each tensor of a difference that is kept."""
        return 1.0 if self.method != "ties" else self.density or 0.2


class MergeStage(MergeRule, Stage):
    """Merges checkpoints of one trajectory, of variants of a stage, or of several stages with one base. The
    result has no optimizer states."""

    VERSION: ClassVar[int] = 1
    RESULT: ClassVar[str] = "checkpoint"
    kind: Literal["merge"] = identity()
    checkpoints: list[Reference] = reference(min_length=1, to="checkpoint")
    base: Reference | None = reference(
        None, to="checkpoint", description="what task-arithmetic and ties measure differences from"
    )
    weights: list[Annotated[float, Field(allow_inf_nan=False)]] | None = reference(
        None,
        description="weights, one per checkpoint; 1 by default. Only the ratios matter, except for"
        " task-arithmetic, where a negative one subtracts what the checkpoint has learned",
    )

    def conflicts(self) -> Iterator[str]:
        if (self.method == "average") != (self.base is None):
            yield (
                "an average has no base; leave it out, or set method: task-arithmetic or ties"
                if self.base
                else f"method: {self.method} needs base, the checkpoint that the others were trained from"
            )
        if self.method != "task-arithmetic" and len(self.checkpoints) < 2:
            yield f"method: {self.method} merges two checkpoints or more; name another one"
        if self.weights is None:
            return
        if len(self.weights) != len(self.checkpoints):
            yield f"{len(self.weights)} weights for {len(self.checkpoints)} checkpoints; give one for each"
        if self.method != "task-arithmetic" and min(self.weights) < 0:
            yield f"{min(self.weights):g} is a negative weight, which only method: task-arithmetic can have"
        if not 0 < sum(map(abs, self.weights)) < inf:
            yield "weights must not all be zero, and their sum must be finite"

    @property
    def parents(self) -> list[Reference]:
        """All checkpoints, `base` last."""
        return [*self.checkpoints, *([self.base] if self.base else [])]


class MergePart(MergeRule, Part):
    """The resolved merge. Inputs: `checkpoint:<i>` in the order of their fingerprints, `base` except for an
    average, `tokenizer`. The result is checkpoint 1 of its artifact."""

    ON_ENGINE: ClassVar[bool] = True
    OF_CHECKPOINTS: ClassVar[bool] = True

    model: ModelSpec = identity()
    weights: list[float] = identity(description="weights in the order of the inputs")
