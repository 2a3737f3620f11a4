"""The `mixture` stage: an immutable sampling recipe over corpora."""

from __future__ import annotations

from typing import ClassVar, Literal

from specs.base import Spec, identity, reference
from specs.stages.base import Stage, WeightField
from specs.units import ReferenceText


class MixtureStage(Stage):
    """`weights` maps parts of corpora (`corpus/code`) to their share, in training samples."""

    VERSION: ClassVar[int] = 1
    kind: Literal["mixture"] = identity()
    weights: dict[ReferenceText, WeightField] = reference(min_length=1)
    max_repetition: float = reference(4.0, gt=0, description="passes over a source that are allowed; a weight may state its own")
    seed: int = identity(28)


class MixturePart(Spec):
    """Resolved. Inputs: `source:<i>` in the order of the corpora's fingerprints, so that names do not matter. Which repetition
    is allowed is a check of the planner and changes no sample, so it bears no identity."""

    weights: list[float] = identity(description="in the order of the inputs")
    seed: int = identity()
