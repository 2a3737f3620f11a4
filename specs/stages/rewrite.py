"""The `rewrite` stage: a checkpoint whose layers run in another order."""

from __future__ import annotations

from typing import ClassVar, Literal

from specs.base import identity
from specs.layer_pairs import LayerPairs
from specs.model import ModelSpec
from specs.stages.base import FromCheckpoint, Part


class RewriteStage(FromCheckpoint):
    """Runs the layers of any checkpoint in pairs. The weights are those of `from`, and nothing is copied:
    `from: <this stage>` is that checkpoint, computed in the new order. Evaluations of several rewrites, as
    of a matrix, are what a `select` stage chooses among."""

    VERSION: ClassVar[int] = 1
    RESULT: ClassVar[str] = "checkpoint"
    kind: Literal["rewrite"] = identity()
    layer_pairs: LayerPairs = identity()


class RewritePart(Part):
    """Resolved. Input: `checkpoint`. States the order of the layers; the weights stay where they are."""

    model: ModelSpec = identity()
