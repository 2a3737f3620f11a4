"""The `rewrite` stage: a checkpoint whose model is computed in another way."""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from specs.base import identity, option
from specs.layer_schedule import LayerPairs
from specs.model import ModelSpec
from specs.sparse_attention import SparseAttention
from specs.stages.base import FromCheckpoint, Part


class RewriteStage(FromCheckpoint):
    """Computes any checkpoint in another way: its layers in pairs, or its attention sparse or full. The
    weights are those of `from`, and nothing is copied: `from: <this stage>` is that checkpoint, computed
    anew. A `select` stage chooses among evaluations of several rewrites, such as those of a matrix."""

    VERSION: ClassVar[int] = 1
    RESULT: ClassVar[str] = "checkpoint"
    kind: Literal["rewrite"] = identity()
    layer_pairs: LayerPairs | None = option(None)
    attention: SparseAttention | Literal["full"] | None = option(
        None, description="instead of the model's; full: all pairs, which an export needs"
    )

    def conflicts(self) -> Iterator[str]:
        if (self.layer_pairs is None) == (self.attention is None):
            yield "a rewrite changes one thing; set layer_pairs or attention"

    @property
    def changes(self) -> dict[str, Any]:
        """Fields of the model, with their new values."""
        if self.layer_pairs is not None:
            return {"layer_pairs": self.layer_pairs}
        return {"attention": None if self.attention == "full" else self.attention}


class RewritePart(Part):
    """The resolved rewrite. Input: `checkpoint`. States how the model is computed; the weights stay where
    they are."""

    model: ModelSpec = identity()
