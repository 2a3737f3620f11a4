"""Estimates the memory of a layer in a training step: what it keeps for its backward pass, for each kind of
recomputation, and what that pass adds; and of the steps of a layer schedule.

Shapes: as in `sizes`; N tokens of a micro-batch on this rank, D width, Q and K widths of queries and keys, F
width of the feed-forward.
"""

from typing import Literal

from flows.planning.estimate.sizes import RankSizes
from specs.capabilities import SPARSE_BLOCK
from specs.layer_schedule import INPUT
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


class LayerMemory:
    """Bytes of one run of a layer for a micro-batch. `reads`: number of earlier steps of the schedule whose
    keys and values attention sees as well; `read_later`: whether later steps read its own; `mamba`: whether
    it mixes tokens by Mamba-2."""

    def __init__(
        self, sizes: RankSizes, device: Device, reads: int = 0, read_later: bool = False, mamba: bool = False
    ) -> None:
        self.sizes, self.device = sizes, device
        self.reads, self.read_later, self.mamba = reads, read_later, mamba
        self.model, self.b, self.tp, self.tokens = sizes.model, sizes.b, sizes.tp, sizes.tokens
        self.length = sizes.tokens / sizes.rows  # tokens of a row on this rank
        self.state = sizes.tokens * sizes.b * sizes.model.dim / sizes.spread  # bytes of the residual stream
        self.checkpointing = sizes.segment.activation_checkpointing

    @property
    def masked(self) -> bool:
        """Whether attention keeps a mask of (tokens x whole sequence). sdpa alone sees keys of earlier
        steps."""
        backend = self.sizes.segment.attention
        return self.device == "cpu" or backend == "sdpa" or self.model.reads_earlier_keys

    def norm(self, width: float) -> float:
        """The bytes per token that a norm keeps besides its result: its input; on CPU, in float32, the input
        and, for its weight's gradient, the normed input. With adapters, weights have no gradients."""
        if self.device == "cuda":
            return self.b * width
        return (8 if self.sizes.segment.adapters is None else 4) * width

    def whole(self) -> float:
        """Bytes that a whole layer keeps without recomputation."""
        model, b, tp, spread = self.model, self.b, self.tp, self.sizes.spread
        queries, keys = model.query_dim / tp, model.key_dim / tp
        # tensor parallelism gathers the results of the norms along the sequence before the matrices
        norms = 2 * (self.norm(model.dim / spread) + b * model.dim)
        norms += self.norm(queries + keys) * model.qk_norm
        heads = (model.n_heads + model.n_kv_heads) * model.qk_norm
        statistics = 4 * (2 / spread + heads / tp)
        # xIELU keeps its input and its result; SwiGLU also the gate, before and after SiLU
        feed_forward = (4 if model.activation == "swiglu" else 2) * b * model.ffn_dim / tp
        mixer = self.mixing() if self.mamba else self.attention()
        masks = 0.0 if self.mamba else self.mask() + self.chosen()
        return self.tokens * (norms + mixer + statistics + feed_forward) + masks

    def attention(self) -> float:
        """The bytes per token that attention keeps besides the norms: queries, keys, values, its result, and
        logarithms of sums. Without a kernel, keys and values exist for each head."""
        model, b, tp = self.model, self.b, self.tp
        queries = model.query_dim / tp
        seen = queries if self.by_operators else model.key_dim / tp
        inputs = b * (queries + 2 * seen * self.sizes.cp * (1 + self.reads))
        return inputs + b * queries + 4 * model.n_heads / tp + 8 * model.head_dim

    def mixing(self) -> float:
        """The bytes per token that a mixer of Mamba-2 keeps besides the norms."""
        return mixing(self.model, self.length, self.b, self.tp)

    def compared(self, by_matrix: bool) -> float:
        """The bytes kept by a mixer whose result, or whose matrix, is compared with that of attention
        (`trainer/objectives/alignment.py`), including its inputs. A comparison of matrices keeps four of
        whole rows: scores, decays, their product, and the difference."""
        model, b = self.model, self.b
        inputs = 2 * b * model.dim + self.norm(model.query_dim + model.key_dim)
        if not by_matrix:
            return self.tokens * (inputs + self.mixing()) + 2 * self.result(by_matrix)
        assert model.mamba is not None
        convolved = b * (model.query_dim + 2 * model.key_dim) * (model.mamba.conv_width + 1)
        wide = self.tokens * (inputs + convolved + 4 * 4 * model.query_dim)
        return wide + 4 * self.result(by_matrix)

    def result(self, by_matrix: bool) -> float:
        """The bytes of the compared tensor: the matrices of all heads and rows, or the tokens' outputs."""
        return 4 * self.tokens * (self.model.n_heads * self.length if by_matrix else self.model.dim)

    @property
    def by_operators(self) -> bool:
        """Whether no kernel computes attention: GPU kernels refuse a mask if heads share keys."""
        return self.device == "cuda" and self.masked and self.model.n_kv_heads < self.model.n_heads

    def mask(self) -> float:
        """Bytes of the mask that a layer keeps: the CPU's kernel makes an additive mask from the boolean one.
        Sparse attention has a mask for every head; without a kernel, each head keeps its softmax."""
        shared = self.model.attention is None and not self.by_operators
        heads = 1 if shared else self.model.n_heads / self.tp
        seen = self.length * self.sizes.cp * (1 + self.reads)
        return self.b * heads * self.tokens * seen if self.masked else 0.0

    def chosen(self) -> float:
        """The bytes that sparse attention keeps besides the mask: its result before zeros are put in, or
        before it is put in the order of the row; without a mask also partitions, places and the maps between
        both orders, in int64, and the blocks in both directions, in int32. Tokens that are left out are
        counted as kept."""
        if self.model.attention is None:
            return 0.0
        kept: float = self.b * self.model.query_dim
        if not self.masked:
            blocks = self.length / SPARSE_BLOCK**2
            kept += 24 * (self.model.n_heads + self.model.n_kv_heads) + 8 * self.model.n_heads * blocks
        return self.tokens * kept / self.tp

    def kept(self) -> float:
        """Bytes that a layer keeps from its forward to its backward pass."""
        model, b, tp = self.model, self.b, self.tp
        if self.checkpointing == "none":
            return self.whole()
        kept = b * model.dim / self.sizes.spread  # its input
        if self.read_later:  # its keys and values; selective recomputation keeps the values in any case
            kept += b * model.key_dim / tp * (2 if self.checkpointing == "full" else 1)
        # every second product: queries, values and the first of the feed-forward
        if self.checkpointing == "selective":
            kept += b * (model.query_dim + model.key_dim + model.ffn_dim) / tp
            if model.activation == "swiglu":  # the seventh product is the result
                kept += b * model.dim
            if self.mamba:  # also products of more than two dimensions
                chunk = min(model.mamba.chunk if model.mamba else 0, self.length)
                kept += 4 * (model.n_heads * chunk + 3 * model.query_dim) / tp
            elif self.device == "cuda":  # the result of attention, and its logarithms
                kept += (b * model.query_dim + 4 * model.n_heads) / tp
        kept = self.tokens * kept + self.sums()
        if self.checkpointing == "memory_budget":
            return kept + self.sizes.segment.memory_budget * (self.whole() - kept)
        return kept

    def sums(self) -> float:
        """The bytes that a layer keeps in addition because of selective recomputation: the sums over
        tensor-parallel ranks that give the results of attention and of the feed-forward, which are not sent
        again. This holds only for the sums of sequence parallelism, which are reduce-scatters."""
        return 2 * self.state if self.checkpointing == "selective" and self.sizes.spread > 1 else 0.0

    def backward(self) -> float:
        """The bytes that a layer's backward pass adds to `kept` at the derivative of the activation:
        recomputed tensors, the gradient of the activation and four tensors like it in place of the activation
        itself (one with the kernel of xIELU, on CUDA), the residual stream's gradient twice, and gradients of
        matrices in the parameters' precision."""
        model, b = self.model, self.b
        again = self.whole() + self.sums() - self.kept() if self.checkpointing != "none" else 0.0
        if self.checkpointing == "full":
            again += self.state
        by_kernel = model.activation == "xielu" and self.device == "cuda"
        feed_forward, states = (1 if by_kernel else 4) * b * model.ffn_dim / self.tp, 2 * b * model.dim
        return again + self.tokens * (feed_forward + states) + b * model.dim * model.ffn_dim / self.tp


def layer_runs(layer: LayerMemory) -> list[list[LayerMemory]]:
    """The layers of every step of the schedule, with their mixer and the keys that they see and keep."""
    model = layer.model
    later = {number for step in model.schedule for number in step.reads}
    return [
        [
            LayerMemory(
                layer.sizes, layer.device, len(step.reads), number in later, index in model.mamba_layers
            )
            for index in step.layers
        ]
        for number, step in enumerate(model.schedule, 1)
    ]


def busiest_step(layer: LayerMemory, runs: list[list[LayerMemory]]) -> tuple[float, float]:
    """For the step of the schedule whose backward pass has the most in memory: the bytes of the gradients
    that are held for other steps, less what is freed by then; and the bytes that a layer adds. Steps run
    backward: a sum of this or of a later step holds the gradients of the earlier states in it, and a step
    that reads keys and values holds those of the steps that made them."""
    model, sizes, moments, freed = layer.model, layer.sizes, [], 0.0
    keys = 2 * sizes.tokens * sizes.b * model.key_dim / sizes.tp
    states, shared = set[int](), set[int]()  # numbers of steps
    for number, step in reversed(list(enumerate(model.schedule, 1))):
        states |= {number - 1 if state == INPUT else state for state in step.summed}
        states.discard(number)
        shared |= set(step.reads)
        layers = runs[number - 1]
        freed += bool(step.summed) * layer.state  # its output: the backward pass of the sum comes first
        moments.append((len(states) * layer.state + len(shared) * keys - freed, layers[-1].backward()))
        shared.discard(number)
        freed += sum(run.kept() for run in layers)
    return max(moments, key=sum)
