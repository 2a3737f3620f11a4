"""The order in which a model runs its layers: a list of steps, and the methods that make an order other than
the plain stack.

The states of a forward pass are numbered: 0 is the embedding, s the output of step s, counted from 1. A step
runs a layer on what the step before passed on, which is that step's output or, if it has `summed`, a weighted
sum of states. The weights of a sum are trained, one for each state and step, and begin as 1 for the step's
own output and 0 for the others: a new model computes what the plain stack computes.

Steps may run a layer again. The keys and values of a step are its own; a step with `reads` attends to those
of earlier steps as well, by the same rule: a token sees the tokens up to its own place in its document.

Invariant: a schedule is a function of the fields of `ModelSpec`. Plan, engine and export read the steps and
never the method that made them.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from hashlib import sha256
from itertools import count
from typing import ClassVar, Literal, NamedTuple, Protocol

from specs.base import Spec, identity, option

MOST_LAYERS = 10_000
MOST_PASSES = 64
INPUT = -1
"""In `LayerStep.summed`: the input of the step, instead of a numbered state."""


class LayerStep(NamedTuple):
    """A layer, and what is passed on after it."""

    layer: int
    summed: Sequence[int] = ()  # the states in the weighted sum that is passed on; empty: the layer's output
    beside: Sequence[int] = ()  # layers that run at the same time, on the same states
    reads: Sequence[int] = ()  # earlier steps, by number, whose keys and values its attention also sees
    normed: bool = False  # whether its output is normed, by one norm for all steps

    @property
    def layers(self) -> tuple[int, ...]:
        """All layers of the step, in the order of the model."""
        return (self.layer, *self.beside)


@cache
def plain(n_layers: int) -> tuple[LayerStep, ...]:
    """The plain stack: every layer once, each on the output of the one before."""
    return tuple(LayerStep(layer) for layer in range(n_layers))


class Method(Protocol):
    """The interface of a field of `ModelSpec` that makes a schedule."""

    PIPELINE: ClassVar[str]  # why the layers cannot be split into a pipeline

    def schedule(self, n_layers: int) -> list[LayerStep]:
        """The steps of a model of `n_layers` layers."""

    def obstacle(self, n_layers: int) -> str | None:
        """Why a model of `n_layers` layers cannot have this schedule; None if it can."""


class DepthAverage(Spec):
    """DenseFormer (arXiv 2402.02622): after every `period`-th layer, a weighted sum of earlier states is
    passed on instead of the layer's output. The sum after layer i (from 1) has the states i, i - dilation,
    i - 2 dilation, ... down to the embedding.

    Unlike the authors' code, the weights are not decayed."""

    PIPELINE: ClassVar[str] = (
        "reads the outputs of earlier layers, and a stage of a pipeline receives only the last one"
    )
    dilation: int = identity(1, ge=1, le=MOST_LAYERS, description="distance of the states in a sum")
    period: int = identity(
        1,
        ge=1,
        le=MOST_LAYERS,
        description="layers from one sum to the next. With a multiple of the dilation plus 1, as in the"
        " paper's 4 and 5, every sum has the output of the layer that read the sum before",
    )
    over: Literal["states", "layer"] = option(
        "states",
        description="layer: of what the layer read and what it gave alone, which is a gain for its residual"
        " branch and one for its skip. This is the control: as many sums, without earlier states",
    )

    def schedule(self, n_layers: int) -> list[LayerStep]:
        return [
            LayerStep(layer, self._summed(layer + 1) if (layer + 1) % self.period == 0 else ())
            for layer in range(n_layers)
        ]

    def _summed(self, state: int) -> Sequence[int]:
        if self.over == "layer":
            return (INPUT, state)
        return range(state % self.dilation, state + 1, self.dilation)

    def obstacle(self, n_layers: int) -> str | None:
        """Why the method, or one of its settings, would have no effect; None if all have one."""
        if self.over == "layer" and self.dilation != 1:
            return f"dilation {self.dilation} has no meaning over: layer; leave it out"
        if self.dilation > n_layers // self.period * self.period:
            return (
                f"with dilation {self.dilation} and period {self.period}, no sum over {n_layers} layers has"
                " an earlier state; lower them"
            )
        return None


class LayerRange(Spec):
    """A range of layers."""

    start: int = identity(ge=0, le=MOST_LAYERS, description="first layer of the range, from 0")
    layers: int = identity(ge=1, le=MOST_LAYERS, description="number of layers in the range")

    def obstacle(self, n_layers: int) -> str | None:
        """Why a model of `n_layers` layers does not have this range; None if it does."""
        end = self.start + self.layers
        if end > n_layers:
            return f"the range ends with layer {end - 1}, but the last layer is {n_layers - 1}"
        return None


class LayerPairs(LayerRange):
    """Layer parallelism (arXiv 2502.02790): in a range of layers, every two neighbours run on the same
    states, and their results are added: x' = x + A1(x) + A2(x), then x' + F1(x') + F2(x'). The weights are
    unchanged, and tensor-parallel processes exchange two sums a pair instead of four."""

    PIPELINE: ClassVar[str] = "runs two layers at a time, which a pipeline could separate"
    layers: int = identity(ge=2, le=MOST_LAYERS, multiple_of=2, description="number of layers in the range")
    form: Literal["paired", "dropped", "swapped", "parallel", "random"] = option(
        "paired",
        description="controls: dropped leaves out the second layer of each pair, swapped runs it first;"
        " parallel runs all layers of the range at once, random makes pairs by `seed` of which none are"
        " neighbours",
    )
    seed: int = option(0, ge=0)

    def schedule(self, n_layers: int) -> list[LayerStep]:
        stack, end = plain(n_layers), self.start + self.layers
        return [*stack[: self.start], *self._steps(range(self.start, end)), *stack[end:]]

    def _steps(self, layers: range) -> list[LayerStep]:
        pairs = list(zip(layers[::2], layers[1::2], strict=True))
        match self.form:
            case "paired":
                return [LayerStep(first, beside=(second,)) for first, second in pairs]
            case "dropped":
                return [LayerStep(first) for first, _ in pairs]
            case "swapped":
                return [LayerStep(layer) for pair in pairs for layer in reversed(pair)]
            case "parallel":
                return [LayerStep(layers[0], beside=tuple(layers[1:]))]
            case "random":
                return [LayerStep(first, beside=(second,)) for first, second in self._random_pairs(layers)]

    def _random_pairs(self, layers: range) -> list[tuple[int, int]]:
        """The first of many orders, by the hashes of seed, turn and layer, whose pairs are no neighbours; in
        the order of their first layers."""
        for turn in count():
            order = sorted(layers, key=lambda layer: sha256(f"{self.seed}/{turn}/{layer}".encode()).digest())
            pairs = [(min(pair), max(pair)) for pair in zip(order[::2], order[1::2], strict=True)]
            if all(second - first > 1 for first, second in pairs):
                return sorted(pairs)
        raise AssertionError("four layers and more have such pairs")

    def conflicts(self) -> Iterator[str]:
        if self.form == "random" and self.layers < 4:
            yield "two layers are neighbours; set layers to 4 or more for random pairs"
        if self.form != "random" and self.seed:
            yield f"seed has no meaning with form: {self.form}; leave it out"


class Repeats(LayerRange):
    """CoTFormer (arXiv 2310.10845): a range of layers runs `times` times with the same weights. In pass r, a
    layer's attention sees the keys and values that this layer made in passes 1 to r: token t sees the tokens
    up to t of its document in each of these passes, always at their own rotary positions. The layers before
    and after the range run once.

    There is no adaptive router: the paper's chooses the tokens that continue among all tokens of a sequence,
    later ones too, so it is not causal."""

    PIPELINE: ClassVar[str] = (
        "runs the same layers several times, and each belongs to one stage of a pipeline"
    )
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
        passes = []
        for number in range(self.times):
            for layer in range(self.start, end):
                earlier = range(number) if self.keys == "all" else ()
                reads = tuple(layer + 1 + each * self.layers for each in earlier)
                passes.append(LayerStep(layer, reads=reads, normed=self.norm and layer == end - 1))
        return [*stack[: self.start], *passes, *stack[end:]]
