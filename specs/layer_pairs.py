"""Layer parallelism: neighbouring layers of a trained model that run at the same time."""

from __future__ import annotations

from typing import ClassVar, Literal

from specs.base import Spec, identity
from specs.layer_schedule import MOST_LAYERS, LayerStep, plain
from specs.options import option


class LayerPairs(Spec):
    """Layer parallelism (arXiv 2502.02790): in a range of layers, every two neighbours run on the same
    states, and their results are added: x' = x + A1(x) + A2(x), then x' + F1(x') + F2(x'). The weights are
    unchanged, and tensor-parallel processes exchange two sums a pair instead of four."""

    PIPELINE: ClassVar[str] = "runs two layers at a time, which a pipeline could separate"
    start: int = identity(ge=0, le=MOST_LAYERS, description="first layer of the range, from 0")
    layers: int = identity(ge=2, le=MOST_LAYERS, multiple_of=2, description="number of layers in the range")
    form: Literal["paired", "dropped", "swapped"] = option(
        "paired",
        description="controls: dropped leaves out the second layer of each pair, swapped runs it first",
    )

    def schedule(self, n_layers: int) -> list[LayerStep]:
        pairs: list[LayerStep] = []
        for layer in range(self.start, self.start + self.layers, 2):
            match self.form:
                case "paired":
                    pairs.append(LayerStep(layer, beside=(layer + 1,)))
                case "dropped":
                    pairs.append(LayerStep(layer))
                case "swapped":
                    pairs += [LayerStep(layer + 1), LayerStep(layer)]
        stack = plain(n_layers)
        return [*stack[: self.start], *pairs, *stack[self.start + self.layers :]]

    def obstacle(self, n_layers: int) -> str | None:
        """Why a model of `n_layers` layers does not have this range; None if it does."""
        end = self.start + self.layers
        if end > n_layers:
            return f"the range ends with layer {end - 1}, but the last layer is {n_layers - 1}"
        return None
