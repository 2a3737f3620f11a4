"""Estimates the memory of a layer in a training step: what it keeps for its backward pass, for each kind of
recomputation, and what that pass adds.

Shapes: N tokens of a micro-batch on this rank, D width, Q and K widths of queries and keys, F width of the
feed-forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specs.capabilities import SPARSE_BLOCK
from specs.model import ModelSpec

Device = Literal["cuda", "cpu"]


def mixing(model: ModelSpec, length: float, b: int, tp: int) -> float:
    """The bytes per token that a mixer of Mamba-2 keeps besides the norms: the inputs of its convolutions and
    of each of their taps; in float32, four matrices of a chunk, the tensors multiplied with them and with the
    states, whose number was counted, and three states of each chunk. `length`: that of a row, in tokens."""
    assert model.mamba is not None
    queries, keys = model.query_dim / tp, model.key_dim / tp
    chunk = min(model.mamba.chunk, length)
    convolved = b * (queries + 2 * keys) * (model.mamba.conv_width + 1)
    matrices = 4 * 4 * model.n_heads / tp * chunk
    wide = 4 * queries * (13.7 + 3 * model.head_dim / chunk)
    return convolved + matrices + wide + b * queries


@dataclass(frozen=True)
class LayerMemory:
    """Bytes of one layer for a micro-batch, from the shapes of a rank."""

    model: ModelSpec
    tokens: float  # of a micro-batch, on this rank
    rows: float  # sequences of a micro-batch
    b: int  # bytes of an element
    tp: int
    cp: int
    spread: int  # ranks that share the residual stream and the norms: tp with sequence parallelism, else 1
    device: Device
    masked: bool  # attention keeps a mask of (tokens x whole sequence)
    checkpointing: str
    budget: float  # of `memory_budget`
    resting: bool  # weights have no gradients (LoRA)
    reads: int = 0  # earlier steps of the schedule whose keys and values attention sees as well
    read_later: bool = False  # whether later steps read its own keys and values
    mamba: bool = False  # whether it mixes tokens by Mamba-2

    def norm(self, width: float) -> float:
        """The bytes per token that a norm keeps besides its result: its input; on CPU, in float32, the input
        and, for its weight's gradient, the normed input."""
        return ((4 if self.resting else 8) if self.device == "cpu" else self.b) * width

    def layer(self) -> float:
        """Bytes that a whole layer keeps without recomputation."""
        model, b = self.model, self.b
        dim, queries, keys = model.dim / self.spread, model.query_dim / self.tp, model.key_dim / self.tp
        # tensor parallelism gathers the results of the norms along the sequence before the matrices
        whole = model.dim
        norms = 2 * (self.norm(dim) + b * whole) + self.norm(queries + keys) * model.qk_norm
        seen = queries if self.by_operators else keys  # keys and values then exist for each head
        attention = (
            b * (queries + 2 * seen * self.cp * (1 + self.reads))
            + b * queries
            + 4 * model.n_heads / self.tp
            + 8 * model.head_dim
        )
        if self.mamba:
            attention = self.mixing()
        heads = (model.n_heads + model.n_kv_heads) * model.qk_norm
        statistics = 4 * (2 / self.spread + heads / self.tp)
        # xIELU keeps its input and its result; SwiGLU also the gate, before and after SiLU
        feed_forward = (4 if model.activation == "swiglu" else 2) * b * model.ffn_dim / self.tp
        masks = 0.0 if self.mamba else self.mask() + self.chosen()
        return self.tokens * (norms + attention + statistics + feed_forward) + masks

    def compared(self, by_matrix: bool) -> float:
        """The bytes kept by a mixer whose result, or whose matrix, is compared with that of attention
        (`trainer/objectives/alignment.py`), including its inputs. A comparison of matrices keeps four of
        whole rows: scores, decays, their product, and the difference."""
        model, b = self.model, self.b
        read = 2 * b * model.dim + self.norm(model.query_dim + model.key_dim)
        if not by_matrix:
            return self.tokens * (read + self.mixing()) + 2 * self.result(by_matrix)
        assert model.mamba is not None
        convolved = b * (model.query_dim + 2 * model.key_dim) * (model.mamba.conv_width + 1)
        wide = self.tokens * (read + convolved + 4 * 4 * model.query_dim)
        return wide + 4 * self.result(by_matrix)

    def result(self, by_matrix: bool) -> float:
        """The bytes of the compared tensor: the matrices of all heads and rows, or the tokens' outputs."""
        matrix = self.model.n_heads * self.tokens / self.rows
        return 4 * self.tokens * (matrix if by_matrix else self.model.dim)

    def mixing(self) -> float:
        """The bytes per token that a mixer of Mamba-2 keeps besides the norms."""
        return mixing(self.model, self.tokens / self.rows, self.b, self.tp)

    @property
    def by_operators(self) -> bool:
        """Whether no kernel computes attention: GPU kernels refuse a mask if heads share keys."""
        return self.device == "cuda" and self.masked and self.model.n_kv_heads < self.model.n_heads

    def mask(self) -> float:
        """Bytes of the mask that a layer keeps: the CPU's kernel makes an additive mask from the boolean one.
        Sparse attention has a mask for every head; without a kernel, each head keeps its softmax."""
        one = self.model.attention is None and not self.by_operators
        heads = 1 if one else self.model.n_heads / self.tp
        whole = (self.tokens / self.rows) * self.cp * (1 + self.reads)
        return self.b * heads * self.tokens * whole if self.masked else 0.0

    def chosen(self) -> float:
        """The bytes that sparse attention keeps besides the mask: its result before zeros are put in, or
        before it is put in the order of the row; without a mask also partitions, places and the maps between
        both orders, in int64, and the blocks in both directions, in int32. Tokens that are left out are
        counted as kept."""
        if self.model.attention is None:
            return 0.0
        kept: float = self.b * self.model.query_dim
        if not self.masked:
            blocks = self.tokens / self.rows / SPARSE_BLOCK**2
            kept += 24 * (self.model.n_heads + self.model.n_kv_heads) + 8 * self.model.n_heads * blocks
        return self.tokens * kept / self.tp

    def kept(self) -> float:
        """Bytes that a layer keeps from its forward to its backward pass."""
        model, b = self.model, self.b
        if self.checkpointing == "none":
            return self.layer()
        kept = b * model.dim / self.spread  # its input
        if self.read_later:  # its keys and values; selective recomputation keeps the values in any case
            kept += b * model.key_dim / self.tp * (2 if self.checkpointing == "full" else 1)
        # every second product: queries, values and the first of the feed-forward
        if self.checkpointing == "selective":
            kept += b * (model.query_dim + model.key_dim + model.ffn_dim) / self.tp
            if model.activation == "swiglu":  # the seventh product is the result
                kept += b * model.dim
            if self.mamba:  # also products of more than two dimensions
                chunk = min(model.mamba.chunk if model.mamba else 0, self.tokens / self.rows)
                kept += 4 * (model.n_heads * chunk + 3 * model.query_dim) / self.tp
            elif self.device == "cuda":  # the result of attention, and its logarithms
                kept += (b * model.query_dim + 4 * model.n_heads) / self.tp
        kept = self.tokens * kept + self.sums()
        return kept + self.budget * (self.layer() - kept) if self.checkpointing == "memory_budget" else kept

    def sums(self) -> float:
        """The bytes that a layer keeps in addition because of selective recomputation: the sums over
        tensor-parallel ranks that give the results of attention and of the feed-forward, which are not sent
        again. This holds only for the sums of sequence parallelism, which are reduce-scatters."""
        kept = self.checkpointing == "selective" and self.spread > 1
        return 2 * self.b * self.tokens * self.model.dim / self.spread if kept else 0.0

    def backward(self) -> float:
        """The bytes that a layer's backward pass adds to `kept` at the derivative of the activation:
        recomputed tensors, the gradient of the activation and four tensors like it in place of the activation
        itself (one with the kernel of xIELU, on CUDA), the residual stream's gradient twice, and gradients of
        matrices in the parameters' precision."""
        model, b = self.model, self.b
        again = self.layer() + self.sums() - self.kept() if self.checkpointing != "none" else 0.0
        if self.checkpointing == "full":
            again += self.tokens * b * model.dim / self.spread
        by_kernel = model.activation == "xielu" and self.device == "cuda"
        feed_forward, states = (1 if by_kernel else 4) * b * model.ffn_dim / self.tp, 2 * b * model.dim
        return again + self.tokens * (feed_forward + states) + b * model.dim * model.ffn_dim / self.tp
