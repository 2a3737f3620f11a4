"""Layers in the middle of a model that run several times (CoTFormer)."""

from __future__ import annotations

from typing import ClassVar, Literal

from specs.base import Spec, identity
from specs.layer_schedule import MOST_LAYERS, LayerStep, plain
from specs.options import option

MOST_PASSES = 64


class Repeats(Spec):
    """CoTFormer (arXiv 2310.10845): a range of layers runs `times` times with the same weights. In pass r, a
    layer's attention sees the keys and values that this layer made in passes 1 to r: token t sees the tokens
    up to t of its document in each of these passes, always at their own rotary positions. The layers before
    and after the range run once.

    There is no adaptive router: the paper's chooses the tokens that continue among all tokens of a sequence,
    later ones too, so it is not causal."""

    PIPELINE: ClassVar[str] = (
        "runs the same layers several times, and each belongs to one stage of a pipeline"
    )
    start: int = identity(ge=0, le=MOST_LAYERS, description="first layer of the range, from 0")
    layers: int = identity(ge=1, le=MOST_LAYERS, description="number of layers in the range")
    times: int = identity(ge=2, le=MOST_PASSES, description="passes through the range")
    keys: Literal["all", "own"] = option(
        "all",
        description="all: attention sees the keys of every pass so far. own: of its own pass alone, which is"
        " the control (block universal transformer)",
    )
    norm: bool = option(
        True,
        description="whether an RMSNorm follows every pass, the last one too; one for all passes, as in the"
        " authors' LN variant",
    )

    def schedule(self, n_layers: int) -> list[LayerStep]:
        stack, end = plain(n_layers), self.start + self.layers
        passes = [
            LayerStep(
                layer,
                reads=tuple(layer + 1 + earlier * self.layers for earlier in range(number))
                if self.keys == "all"
                else (),
                normed=self.norm and layer == end - 1,
            )
            for number in range(self.times)
            for layer in range(self.start, end)
        ]
        return [*stack[: self.start], *passes, *stack[end:]]

    def obstacle(self, n_layers: int) -> str | None:
        """Why a model of `n_layers` layers does not have this range; None if it does."""
        end = self.start + self.layers
        if end > n_layers:
            return f"the range ends with layer {end - 1}, but the last layer is {n_layers - 1}"
        return None
