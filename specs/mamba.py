"""Layers that mix tokens by Mamba-2 instead of attention."""

import math
from typing import Annotated, Literal

from pydantic import Field, field_validator

from specs.base import Spec, execution, identity, option
from specs.layer_schedule import MOST_LAYERS

OWN = ("conv_c", "conv_b", "conv_x", "a_log", "dt_bias", "d", "out_norm", "z_proj.weight", "dt_proj.weight")
"""Parameters of a Mamba-2 layer that attention does not have."""
OF_DECAYS = ("a_log", "dt_bias", "dt_proj.weight")
"""Those that linear attention does not have."""


class Mamba(Spec):
    """Mamba-2 (arXiv 2405.21060) in place of attention, in the form of arXiv 2408.15237: every query head has
    a state of head_dim x head_dim, which it decays at each token, writes with its key (B) and value (x), and
    reads with its query (C). The projections of queries, keys and values, the norms of queries and keys and
    the output projection are those of attention, with its names and shapes, so that they can begin with the
    weights of attention. There are no rotary positions. State and convolution start afresh with every
    document."""

    layers: list[Annotated[int, Field(ge=0, le=MOST_LAYERS)]] | Literal["all"] = identity(
        description="numbers of the layers, from 0; the others keep attention"
    )
    conv_width: int = identity(
        4, ge=1, le=64, description="tokens that the convolution of queries, keys and values sees"
    )
    decay: bool = option(
        True,
        description="false: linear attention (arXiv 2006.16236), with the convolution, gates and norm of"
        " Mamba-2: the state adds up what all tokens write, with decays and step sizes of 1",
    )
    chunk: int = execution(
        64,
        ge=1,
        le=4096,
        description="tokens that are mixed by one matrix; the state goes from one chunk to the next. The"
        " result is the same but for rounding",
    )

    @field_validator("layers")
    @classmethod
    def _in_order(cls, layers: list[int] | Literal["all"]) -> list[int] | Literal["all"]:
        if layers == "all":
            return layers
        if not layers or len(set(layers)) < len(layers):
            raise ValueError(f"{layers} names no layer, or one twice; name each layer once, or all of them")
        return sorted(layers)

    @property
    def own(self) -> tuple[str, ...]:
        """The parameters of a layer that attention does not have."""
        return OWN if self.decay else tuple(name for name in OWN if name not in OF_DECAYS)

    def numbers(self, n_layers: int) -> list[int]:
        """The numbers of the layers without attention."""
        return list(range(n_layers)) if self.layers == "all" else list(self.layers)

    def obstacle(self, n_layers: int) -> str | None:
        """Why a model of `n_layers` layers does not have these layers; None if it does."""
        last = max(self.numbers(n_layers))
        return None if last < n_layers else f"there is no layer {last}, the last is {n_layers - 1}"

    def products(self, heads: int, head_dim: int, sequence_length: float) -> float:
        """The multiply-adds of a layer per token, without its projections: those of the matrix of a chunk and
        of mixing by it, of what a chunk adds to the state and reads from it, and of passing on the states of
        chunks. The last chunk is padded."""
        chunk = min(self.chunk, sequence_length)
        filled = math.ceil(sequence_length / chunk) * chunk / sequence_length
        each = heads * head_dim * (2 * chunk + 2 * head_dim) * filled
        return each + self.passed_on(heads, head_dim, sequence_length)

    def passed_on(self, heads: int, head_dim: int, sequence_length: float) -> float:
        """The multiply-adds of `products` that pass on the states of chunks."""
        chunks = math.ceil(sequence_length / min(self.chunk, sequence_length))
        return heads * head_dim**2 * chunks**2 / sequence_length

    def reading(self, heads: int, head_dim: int, tokens: float) -> float:
        """The multiply-adds of a layer, without its projections, for all of `tokens` tokens that an export's
        class reads after others, whose state it has."""
        chunks, rest = divmod(tokens, self.chunk)
        return sum(
            heads * head_dim * 2 * (size + head_dim) * size * number
            for size, number in ((self.chunk, chunks), (rest, 1))
        )


class NewMixers(Mamba):
    """Layers of a checkpoint whose attention becomes Mamba-2."""

    initial: Literal["attention", "random"] = identity(
        "attention",
        description="attention: projections and norms begin with those of the layer's attention, and only"
        " what attention does not have is drawn. random: all of a mixer is drawn, which is the control",
    )

    def new_parameters(self, n_layers: int) -> tuple[str, ...]:
        """The name patterns of the parameters that do not begin with those of the checkpoint."""
        names = self.own if self.initial == "attention" else ("*",)
        return tuple(f"layers.{layer}.attention.{name}" for layer in self.numbers(n_layers) for name in names)
