"""The dimensions of the Apertus architecture, and what follows from them: parameters and products.

Invariant: the dimensions alone identify a model. The name of a flavour only fills in dimensions that were not
given, and is not part of the identity. Sources: Apertus report (arXiv 2509.14233) table 1 and appendix E;
Llama-3-type RoPE scaling; xIELU arXiv 2411.13010.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import field_validator, model_validator

from specs.base import Spec, execution, identity, option
from specs.layer_schedule import MOST_LAYERS, DepthAverage, LayerPairs, LayerStep, Method, Repeats, plain
from specs.mamba import Mamba
from specs.sparse_attention import SparseAttention

MOST = 2**24
"""Limit of a width, a number of heads and a vocabulary: over a hundred times that of any model."""
_DIMENSIONS = ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn_dim", "vocab_size")
_SIZES: dict[str, tuple[float, ...]] = {
    "mini": (96, 3, 3, 1, 32, 480, 2048),  # for CPUs
    # The follow-up report (arXiv 2605.29128) states 0.44B parameters and no dimensions. Chosen: half the
    # width of 1.5b, with its 8 key heads of 64; feed-forward 5.25 times the width as in 8b and 70b; 12 layers
    # then have 0.44B parameters.
    "0.5b": (1024, 12, 16, 8, 64, 5376, 131_072),
    # The 1.5B model of the report's ablations (table 3) and of the follow-up (arXiv 2605.29128: 16 layers,
    # width 2048, 32/8 heads, untied). xIELU has no gate, so its feed-forward width is 12,288 where the gated
    # baseline has 8192 (table 3): two matrices have as many parameters as three had.
    "1.5b": (2048, 16, 32, 8, 64, 12_288, 131_072),
    # The report names a 3B model (table 3) and no dimensions. Chosen: the shape of Llama 3.2 3B, as 1.5b has
    # that of Llama 3.2 1B, with the same widening of 8192 to 12,288; with untied embeddings it has 3.62B
    # parameters.
    "3b": (3072, 28, 24, 8, 128, 12_288, 131_072),
    # Report, table 1; head dimension, parameter counts and feed-forward width 5.25 d as in the released run
    # scripts.
    "8b": (4096, 32, 32, 8, 128, 21_504, 131_072),
    "70b": (8192, 80, 64, 8, 128, 43_008, 131_072),
}
FLAVOURS = {name: dict(zip(_DIMENSIONS, sizes, strict=True)) for name, sizes in _SIZES.items()}
# Weights as small as the large models' would keep a narrow model on a plateau for most of a short run.
FLAVOURS["mini"]["init_std"] = 0.06


class RopeScaling(Spec):
    """Llama-3-type frequency scaling of the rotary embedding, on from the start of pretraining."""

    factor: float = identity(8.0, ge=1)
    low_freq_factor: float = identity(1.0, gt=0)
    high_freq_factor: float = identity(4.0, gt=0)
    original_max_position: int = identity(8192, gt=0, le=2**31)

    def conflicts(self) -> Iterator[str]:
        low, high = self.low_freq_factor, self.high_freq_factor
        if high <= low:
            yield f"high_freq_factor {high:g} is not above low_freq_factor {low:g}; raise it"


class ModelSpec(Spec):
    """A decoder: GQA with QK-norm before RoPE, pre-norm RMSNorm, untied embeddings, no biases."""

    flavour: str | None = execution(
        None, description=f"fills in the dimensions that are not given: {', '.join(FLAVOURS)}"
    )
    dim: int = identity(gt=0, le=MOST)
    n_layers: int = identity(gt=0, le=MOST_LAYERS)
    n_heads: int = identity(gt=0, le=MOST)
    n_kv_heads: int = identity(gt=0, le=MOST)
    head_dim: int = identity(gt=0, le=MOST)
    ffn_dim: int = identity(gt=0, le=MOST)
    vocab_size: int = identity(gt=0, le=MOST, description="GPUs are fastest with a multiple of 128")
    rope_theta: float = identity(500_000.0, gt=0)
    rope_scaling: RopeScaling | None = identity(default_factory=RopeScaling)
    activation: Literal["xielu", "swiglu"] = option(
        "xielu",
        description="activation of the feed-forward. swiglu (arXiv 2002.05202, as in Llama) is for"
        " comparison: such a model can be neither exported nor sampled from, since ApertusForCausalLM has no"
        " gate. Its three matrices have as many parameters as xielu's two with 2/3 of the ffn_dim",
    )
    qk_norm: bool = option(
        True,
        description="a norm of queries and keys before RoPE. A model without one is for comparison: it can be"
        " neither exported nor sampled from, since ApertusForCausalLM has it",
    )
    head: Literal["vocabulary", "reward"] = option(
        "vocabulary",
        description="vocabulary: logits of the next token; reward: one number at every token, which only a"
        " reward_model stage makes",
    )
    depth_average: DepthAverage | None = option(
        None,
        description="passes on weighted sums of earlier layers' outputs (DenseFormer). The layers then cannot"
        " be split into a pipeline, and an export has a model_type of its own",
    )
    layer_pairs: LayerPairs | None = option(
        None,
        description="runs neighbouring layers at the same time (layer parallelism), as a rewrite stage does",
    )
    attention: SparseAttention | None = option(
        None,
        description="every head computes a part of the pairs of queries and keys; all by default. An export"
        " needs full attention, to which a rewrite stage goes back",
    )
    mamba: Mamba | None = option(
        None,
        description="layers that mix tokens by Mamba-2 instead of attention; an export has a model_type of"
        " its own",
    )
    repeats: Repeats | None = option(
        None,
        description="runs layers in the middle several times, with the keys of all passes (CoTFormer). The"
        " layers then cannot be split into a pipeline, and an export has a model_type of its own",
    )
    norm_eps: float = identity(1e-5, gt=0)
    init_std: float = identity(
        0.008944,
        gt=0,
        description="standard deviation of the initial weights; output projections / sqrt(2 n_layers)",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_from_flavour(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("flavour") is None:
            return data
        # beside a wrong flavour, which its field refuses, no dimension is called missing
        return {**FLAVOURS.get(str(data["flavour"]), FLAVOURS["mini"]), **data}

    @field_validator("flavour")
    @classmethod
    def _known_flavour(cls, flavour: str | None) -> str | None:
        if flavour is not None and flavour not in FLAVOURS:
            raise ValueError(f"there is no flavour '{flavour}'; use one of {', '.join(FLAVOURS)}")
        return flavour

    def conflicts(self) -> Iterator[str]:
        if self.n_heads % self.n_kv_heads:
            yield f"n_heads {self.n_heads} is not a multiple of n_kv_heads {self.n_kv_heads}"
        if self.head_dim % 2:
            yield f"head_dim {self.head_dim} is odd; rotary embeddings turn pairs of dimensions"
        if len(self._methods) > 1:
            yield f"a model has one order of its layers; set one of {', '.join(self._methods)}"
        for name, method in self._methods.items():
            if obstacle := method.obstacle(self.n_layers):
                yield f"{name}: {obstacle}"
        if obstacle := self.attention_obstacle or self.mamba_obstacle:
            yield obstacle

    @property
    def attention_obstacle(self) -> str | None:
        """Why the order of the layers does not allow this attention; None if it does."""
        if self.attention is None or not self.reads_earlier_keys:
            return None
        return (
            "with repeats, layers read the keys of earlier passes, of which sparse attention chooses"
            " none; set attention or repeats, or repeats.keys: own"
        )

    @property
    def mamba_obstacle(self) -> str | None:
        """Why the layers of `mamba` cannot mix tokens by Mamba-2; None if they can."""
        if self.mamba is None:
            return None
        for name in ("attention", *self._methods):
            if getattr(self, name) is not None:
                return f"no layer is computed with mamba and {name} in one model; set one of the two"
        if not self.qk_norm:
            return "mamba begins with the norms of queries and keys; leave out qk_norm: false"
        obstacle = self.mamba.obstacle(self.n_layers)
        return f"mamba: {obstacle}" if obstacle else None

    @property
    def _methods(self) -> dict[str, Method]:
        """The stated fields that make a schedule other than the plain stack; only one may be stated."""
        methods = {name: getattr(self, name) for name in ("depth_average", "layer_pairs", "repeats")}
        return {name: method for name, method in methods.items() if method is not None}

    @property
    def method(self) -> tuple[str, Method] | None:
        """The name and the value of the field that makes the schedule; None for the plain stack."""
        return next(iter(self._methods.items()), None)

    @property
    def without_method(self) -> ModelSpec:
        """The plain stack of the same layers, with full attention."""
        return self.model_copy(update=dict.fromkeys([*self._methods, "attention"]))

    def scores(self, sequence_length: float) -> float:
        """The multiply-adds of a layer's scores and weighted values per token, in full, not halved for the
        causal mask, times the share of the pairs that sparse attention computes."""
        full = 2 * self.query_dim * sequence_length
        return full if self.attention is None else round(full * self.attention.share(sequence_length))

    @property
    def plain_stack(self) -> bool:
        """Whether every layer runs once, on the output of the one before."""
        return self.method is None

    @property
    def stock(self) -> bool:
        """Whether transformers' own Apertus class computes this order and these mixers."""
        return self.plain_stack and self.mamba is None

    @property
    def mamba_layers(self) -> list[int]:
        """The numbers of the layers without attention."""
        return [] if self.mamba is None else self.mamba.numbers(self.n_layers)

    @property
    def schedule(self) -> Sequence[LayerStep]:
        """The order in which the layers run, and what is passed on."""
        return plain(self.n_layers) if self.method is None else self.method[1].schedule(self.n_layers)

    @property
    def layer_runs(self) -> int:
        """The number of layers that run for a token, each counted as often as it runs."""
        return self.n_layers if self.method is None else sum(len(step.layers) for step in self.schedule)

    @property
    def score_runs(self) -> int:
        """The number of key sequences that a token's queries are compared with: one for each run of a layer
        with attention, and one for each earlier step whose keys it reads."""
        runs = sum(len(step.layers) * (1 + len(step.reads)) for step in self.schedule)
        return runs - len(self.mamba_layers)

    @property
    def reads_earlier_keys(self) -> bool:
        """Whether some step attends to the keys of earlier steps."""
        return any(step.reads for step in self.schedule)

    @property
    def sum_weights(self) -> int:
        """The number of weights in the schedule: one for each state of each sum."""
        return sum(len(step.summed) for step in self.schedule)

    @property
    def schedule_vectors(self) -> int:
        """The number of parameters of the schedule's norm."""
        return self.dim * any(step.normed for step in self.schedule)

    @property
    def ffn_matrices(self) -> int:
        """The number of matrices of the feed-forward: up and down, and a gate with SwiGLU."""
        return 3 if self.activation == "swiglu" else 2

    @property
    def query_dim(self) -> int:
        """Width of the queries of all heads."""
        return self.n_heads * self.head_dim

    @property
    def key_dim(self) -> int:
        """Width of the keys of all heads, and of their values."""
        return self.n_kv_heads * self.head_dim

    @property
    def layer_vectors(self) -> int:
        """The number of parameters of a layer in norms and in the scalars of xIELU."""
        return 2 * self.dim + 2 * self.head_dim * self.qk_norm + 2 * (self.activation == "xielu")

    @property
    def sides(self) -> dict[str, tuple[int, int]]:
        """The inputs and outputs of the matrices of a layer, by their names in the engine."""
        dim, queries, keys, ffn = self.dim, self.query_dim, self.key_dim, self.ffn_dim
        attention = {"wq": (dim, queries), "wk": (dim, keys), "wv": (dim, keys), "wo": (queries, dim)}
        gate = {"gate_proj": (dim, ffn)} if self.activation == "swiglu" else {}
        return {**attention, **gate, "up_proj": (dim, ffn), "down_proj": (ffn, dim)}

    @property
    def layer_matrices(self) -> int:
        return sum(inputs * outputs for inputs, outputs in self.sides.values())

    @property
    def mamba_matrices(self) -> int:
        """The number of parameters in matrices that a Mamba-2 layer has in addition to attention's
        projections: those of gates and of step sizes."""
        return self.dim * (self.query_dim + self.decayed_heads)

    @property
    def decayed_heads(self) -> int:
        """The heads of a Mamba-2 layer that have step sizes and decays: all or none."""
        return self.n_heads if self.mamba is not None and self.mamba.decay else 0

    @property
    def mamba_sides(self) -> list[tuple[int, int]]:
        """The sides of what a Mamba-2 layer has besides: matrices of gates and step sizes, convolutions."""
        if self.mamba is None:
            return []
        convolved = [(width, self.mamba.conv_width) for width in (self.query_dim, self.key_dim, self.key_dim)]
        steps = [(self.dim, self.n_heads)] if self.mamba.decay else []
        return [(self.dim, self.query_dim), *steps, *convolved]

    @property
    def mamba_vectors(self) -> int:
        """A Mamba-2 layer's other parameters: convolutions, norm of what is gated, one or three numbers a
        head."""
        if self.mamba is None:
            return 0
        convolved = (self.query_dim + 2 * self.key_dim) * self.mamba.conv_width
        return convolved + self.query_dim + self.n_heads + 2 * self.decayed_heads

    def mamba_products(self, sequence_length: float) -> int:
        """The multiply-adds of a Mamba-2 layer per token, without its projections."""
        if self.mamba is None:
            return 0
        return round(self.mamba.products(self.n_heads, self.head_dim, sequence_length))

    def mamba_constants(self, sequence_length: float) -> int:
        """The multiply-adds per token of a Mamba-2 layer that multiply states by constants, which have no
        gradient: those that pass on states, without decay."""
        if self.mamba is None or self.mamba.decay:
            return 0
        return int(self.mamba.passed_on(self.n_heads, self.head_dim, sequence_length))

    def mamba_reading(self, tokens: float) -> float:
        """The multiply-adds of an export's Mamba-2 layer for tokens after others, without its projections."""
        return 0.0 if self.mamba is None else self.mamba.reading(self.n_heads, self.head_dim, tokens)

    @property
    def mamba_state(self) -> tuple[int, int]:
        """How many numbers a Mamba-2 layer keeps of a sequence: those of its state, and the last inputs of
        its convolution."""
        if self.mamba is None:
            return 0, 0
        width = self.query_dim + 2 * self.key_dim
        return self.query_dim * self.head_dim, (self.mamba.conv_width - 1) * width

    @property
    def outputs(self) -> int:
        """How many numbers the output layer gives for a token: a logit of every word, or a reward."""
        return 1 if self.head == "reward" else self.vocab_size

    @property
    def parameters(self) -> int:
        """Exact number of trainable parameters (8B: 8,053,338,176; 70B: 70,599,864,480)."""
        layers = self.n_layers * (self.layer_matrices + self.layer_vectors)
        layers += len(self.mamba_layers) * (self.mamba_matrices + self.mamba_vectors)
        schedule = self.sum_weights + self.schedule_vectors
        return layers + schedule + (self.vocab_size + self.outputs) * self.dim + self.dim
