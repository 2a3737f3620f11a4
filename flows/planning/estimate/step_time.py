"""Estimates the seconds of a training step from the shapes alone, as a table of terms: the sums of a
rehearsal without its operators, so that thousands of layouts can be compared.

A rank's operators run one after the other. Collectives of tensor, context and pipeline parallelism are waited
for, except for the time that async_tp hides; those of FSDP run beside computation, and only the time beyond
it is waited for. Rates and their sources are those of a rehearsal (`apertus_model.rehearsal.rates`).

Invariants: a pure function of shapes, layout and rates. `ACCESSES` and `COMPILED` follow from the operators
of the model: a change that fuses some of them must change both. `tests/flows/execution/test_rehearsal.py`
compares the sum with that of a rehearsal. Host time is not included.

Shapes: as in `sizes`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

from apertus_model.rehearsal.rates import Rates, hidden_seconds, unmasked
from apertus_model.rehearsal.records import PAIRS
from flows.planning.estimate.layer_memory import mixing
from flows.planning.estimate.sizes import RankSizes
from specs.capabilities import CHUNK_TOKENS, OPTIMIZERS, WIDTHS
from specs.launch import Parallel
from specs.stages.training import Segment


class Passes(NamedTuple):
    """A number for the forward and one for the backward pass of a layer."""

    forward: float
    backward: float


# How often memory-bound operators read or write an element of the parameters' precision, per layer and token,
# by the width of the tensors.
ACCESSES = {
    "residual": Passes(10, 12),  # norms and sums; shared by ranks with sequence parallelism
    "whole": Passes(0, 6),  # gradients that several matrices give their input
    "heads": Passes(4, 5),  # norm and RoPE of queries and keys, one kernel each
    "xielu": Passes(2, 3),  # one kernel
    "swiglu": Passes(5, 12),
    "gather": Passes(4, 4),  # sequence parallelism: pieces are copied together before and after an exchange
}
# The same for compiled layers, whose operators between two products are one kernel.
COMPILED = ACCESSES | {"residual": Passes(9, 10), "whole": Passes(0, 7), "swiglu": Passes(5, 7)}
# Bytes that casts to float8 read or write, per element of a multiplied tensor, forward and backward: weights,
# inputs of linear layers, and gradients of their outputs. A compiler casts an input of several layers only
# once. A maximum over a tensor is a pass of its own, unless it is part of the kernel that makes the tensor.
CASTS = {"weights": Passes(31, 33), "inputs": Passes(31, 33), "gradients": Passes(0, 33)}
COMPILED_CASTS = {"weights": Passes(5, 6), "inputs": Passes(3.5, 4.5), "gradients": Passes(0, 5)}
# The same for MXFP8: kernels of torchao read an element in bfloat16 and write it in float8, once for scales
# along the rows, and once for scales along the columns.
BLOCK_CASTS = {"weights": Passes(3, 3), "inputs": Passes(3, 3), "gradients": Passes(0, 6)}
CLIPPED = 12.0  # bytes per gradient: read for the norm; read and written to be scaled


@dataclass(frozen=True)
class StepTime:
    """Predicted seconds of the busiest rank."""

    compute: float
    waited: float  # collectives that no computation hides
    bubble: float  # idle time of a pipeline, as a fraction of the other two

    @property
    def total(self) -> float:
        return (self.compute + self.waited) * (1 + self.bubble)


def bubble(parallel: Parallel, micro_batches: int) -> float:
    """The idle time of a pipeline per time of work (Narayanan et al. 2021, arXiv 2104.04473, section 2.2)."""
    return (parallel.pp - 1) / (micro_batches * (parallel.stages // parallel.pp))


class RankWork(RankSizes):
    """What one rank of a pipeline computes and sends in a step, and the seconds of each operator."""

    def __init__(self, segment: Segment, processes: int, rank: int, rates: Rates) -> None:
        super().__init__(segment, processes, rank)
        self.rates = rates
        self.runs = self.layers if self.piped else self.model.layer_runs  # of layers, for a micro-batch
        self.split = self.parallel.sequence_parallel and self.tp > 1
        self.recomputation = segment.activation_checkpointing
        self.float8 = segment.precision.linear != "param"
        self.frozen = segment.adapters is not None  # matrices without gradients of their own
        # tokens that attend to each other: a rehearsal's row is one document, or `pairs` completions
        pairs = 1 if self.objective.rows == "tokens" else 2 * PAIRS
        self.length = -(-segment.sequence_length // pairs)
        self.states = self.b * self.tokens * self.model.dim  # bytes of those of a micro-batch

    # Ranks are numbered with tp innermost, then cp, dp_shard, dp_replicate and pp.

    def sent(self, kind: str, size: float, number: int, stride: int) -> float:
        """The seconds of an exchange among `number` ranks that lie `stride` apart; 0 for a single rank."""
        return self.rates.between(kind, size, number, _nodes(number, stride, self.rates.gpus_per_node))

    def over_tp(self, kind: str) -> float:
        """The seconds of an exchange of states among tensor-parallel ranks."""
        return self.sent(kind, self.states, self.tp, 1)

    @property
    def summed_over_tp(self) -> float:
        """The seconds of a sum of states, of which sequence parallelism leaves each rank a part."""
        return self.over_tp("reduce-scatter" if self.split else "all-reduce")

    def over_fsdp(self, gathered: float, reduced: float) -> float:
        """The seconds of FSDP's gathers of `gathered` parameters and reductions of `reduced` ones, the
        numbers that a rank would have without FSDP."""
        seconds = self.sent("all-gather", self.b * gathered, self.shards, self.tp)
        seconds += self.sent("reduce-scatter", 4 * reduced, self.shards, self.tp)
        copies, stride = self.parallel.dp_replicate, self.tp * self.shards
        return seconds + self.sent("all-reduce", 4 * reduced / self.shards, copies, stride)

    def product(self, tokens: float, inputs: float, outputs: float, result: float = 0.0) -> float:
        """The seconds of a product with a matrix of this rank. `result`: bytes that it adds to."""
        moved = self.b * (tokens * inputs + inputs * outputs + tokens * outputs) + result
        return self.rates.compute(2 * tokens * inputs * outputs, moved, "matrix", self.b)

    def moved(self, size: float) -> float:
        return self.rates.compute(0, size, "memory", self.b)

    @cached_property
    def sides(self) -> list[tuple[float, float]]:
        """The inputs and outputs of a layer's matrices on this rank: queries, keys, values, output;
        feed-forward, with its down projection last."""
        return [
            (inputs / self.tp, outputs) if name in ("wo", "down_proj") else (inputs, outputs / self.tp)
            for name, (inputs, outputs) in self.model.sides.items()
        ]

    @cached_property
    def products(self) -> list[float]:
        """The seconds of the products with the matrices of `sides`, forward."""
        if not self.float8:
            return [self.product(self.tokens, *side) for side in self.sides]
        moved = [self.tokens * a + a * b + self.b * self.tokens * b for a, b in self.sides]
        operations = [2 * self.tokens * a * b for a, b in self.sides]
        return [self.rates.compute(*cost, "matrix", 1) for cost in zip(operations, moved, strict=True)]

    @cached_property
    def scores(self) -> float:
        """The seconds of a layer's scores, forward; the mean of layers that see different numbers of keys."""
        model = self.model
        seen = model.score_runs / max(1, model.layer_runs)
        flops = 2 * self.tokens * model.scores(self.length) * seen / self.tp * unmasked(1, self.cp)
        moved = 2 * self.b * self.tokens * (model.query_dim + model.key_dim * self.cp * seen) / self.tp
        return self.rates.compute(flops, moved, "attention", self.b)

    @cached_property
    def mixing(self) -> float:
        """The seconds that Mamba-2 takes in place of scores, forward, averaged over all layers: gates, step
        sizes, and products by chunks in float32, of which each tensor that is kept is written and read."""
        model = self.model
        if model.mamba is None:
            return 0.0
        gates = self.product(self.tokens, model.dim, model.query_dim / self.tp)
        steps = self.product(self.tokens, model.dim, model.n_heads / self.tp) if model.mamba.decay else 0.0
        kept = mixing(model, self.tokens / self.rows, self.b, self.tp)
        flops = 2 * self.tokens * model.mamba_products(self.length) / self.tp
        scan = self.rates.compute(flops, 2 * self.tokens * kept, "matrix", 4)
        return (gates + steps + scan) * len(model.mamba_layers) / model.n_layers

    @cached_property
    def accesses(self) -> Passes:
        """The seconds of a layer's memory-bound operators, and of its casts to float8."""
        model, compiled = self.model, self.segment.compile
        widths = {
            "residual": model.dim / self.spread,
            "whole": model.dim,
            "heads": (model.query_dim + model.key_dim) / self.tp * (1 if model.qk_norm else 0.5),
            model.activation: model.ffn_dim / self.tp,
            "gather": 2 * model.dim * self.split,
        }
        operators = self._seconds(COMPILED if compiled else ACCESSES, widths, self.b * self.tokens)
        if not self.float8:
            return operators
        inputs = [inputs for inputs, _ in self.sides]
        shared = [inputs[0], inputs[3], inputs[4], inputs[-1]] if compiled else inputs
        sizes = {
            "weights": sum(inputs * outputs for inputs, outputs in self.sides),
            "inputs": self.tokens * sum(shared),
            "gradients": self.tokens * sum(outputs for _, outputs in self.sides),
        }
        passes = COMPILED_CASTS if compiled else CASTS
        blocks = self.segment.precision.linear == "mxfp8"
        casts = self._seconds(BLOCK_CASTS if blocks else passes, sizes, 1)
        return Passes(casts.forward + operators.forward, casts.backward + operators.backward)

    def _seconds(self, passes: Mapping[str, Passes], sizes: Mapping[str, float], scale: float) -> Passes:
        """The seconds of reading and writing tensors of these sizes, `scale` bytes for each unit of size."""
        forward = sum(passes[name].forward * size for name, size in sizes.items())
        backward = sum(passes[name].backward * size for name, size in sizes.items())
        return Passes(self.moved(scale * forward), self.moved(scale * backward))

    @property
    def forward(self) -> float:
        return sum(self.products) + self.scores + self.mixing + self.accesses.forward

    @property
    def parameters(self) -> float:
        """The parameters of the rank, before FSDP."""
        count = self.count
        return self.layers * count.layer + count.embedding * self.first + count.head * self.last

    @property
    def rounded(self) -> float:
        """Bytes that a cast of a parameter or gradient from or to float32 moves."""
        return 4.0 + self.b if self.b < 4 else 0.0

    @property
    def gathered_and_reduced(self) -> tuple[float, float]:
        """The parameters that FSDP gathers and reduces, for each run of a layer. Layers and the embedding are
        gathered again for the backward pass, unless they stay gathered, as in a pipeline."""
        each = self.parameters + max(0, self.runs - self.layers) * self.count.layer
        again = self.runs * self.count.layer + self.count.embedding * (not self.frozen)
        again *= self.parallel.reshards and not self.piped
        return each + again, 0.0 if self.frozen else each

    @cached_property
    def teacher(self) -> RankWork:
        """The forward passes of a teacher, of which the last rank of a pipeline has all."""
        alone = {"activation_checkpointing": "none", "compile": False, "model": self.segment.teacher_beside}
        return RankWork(self.segment.model_copy(update=alone), self.processes, self.rank, self.rates)


def recomputed(rank: RankWork) -> float:
    """The part of a layer's forward pass that runs again: every second product, all, or at most the share
    that is not kept."""
    return {
        "none": 0.0,
        "selective": sum(rank.products[1::2]) + rank.accesses.forward,
        "full": rank.forward,
        "memory_budget": (1 - rank.segment.memory_budget) * rank.forward,
    }[rank.recomputation]


def tensor_parallel(rank: RankWork) -> float:
    """The exchanges of a layer's states: two halves, forward and backward. With sequence parallelism, a half
    gathers them and scatters their sum; without, it sums them. Layers of one step of a schedule send one sum.
    Recomputation repeats the gathers; if full, the sums as well."""
    again, full = rank.recomputation != "none", rank.recomputation == "full"
    sums = len(rank.model.schedule) / max(1, rank.model.layer_runs)
    small = rank.sent("all-reduce", 0, rank.tp, 1)  # gradients of norms, and of xIELU's scalars
    if not rank.split:
        return (2 + 2 * sums * (1 + again)) * rank.over_tp("all-reduce") + 4 * small
    gather, scatter = rank.over_tp("all-gather"), rank.over_tp("reduce-scatter")
    seconds = 2 * (1 + sums) * (gather + scatter) + 2 * again * gather + 2 * full * sums * scatter
    return seconds - (hidden(rank, gather, scatter) if rank.parallel.async_tp else 0.0) + 2 * small


def hidden(rank: RankWork, gather: float, scatter: float) -> float:
    """The seconds of a layer's exchanges that async_tp hides behind the products that read or made what is
    sent. A cast to float8 needs all of its input, so it hides no gather, and the sum of several products
    hides nothing."""
    *reads, output = rank.products[:4]
    *up, down = rank.products[4:]
    again, full = rank.recomputation != "none", rank.recomputation == "full"

    def beside(collective: float, products: list[float]) -> float:
        overlapped = 0.0
        for product in products:
            overlapped += hidden_seconds(collective - overlapped, product, rank.tp)
        return overlapped

    seconds = (1 + full) * (beside(scatter, [output]) + beside(scatter, [down]))
    seconds += beside(scatter, up) * (len(up) == 1)
    if not rank.float8:
        seconds += (1 + again) * (beside(gather, reads) + beside(gather, up))
        seconds += beside(gather, [output] * 2) + beside(gather, [down] * 2)
    return seconds


def context_parallel(rank: RankWork) -> float:
    """The gathers of a layer's keys and values, which recomputation repeats, and the sums of gradients."""
    keys = rank.b * rank.rows * rank.segment.sequence_length * rank.model.key_dim / rank.tp
    gathers = 2 * (1 + (rank.recomputation != "none")) * rank.sent("all-gather", keys, rank.cp, rank.tp)
    return gathers + 2 * rank.sent("reduce-scatter", keys, rank.cp, rank.tp)


def logits(rank: RankWork) -> float:
    """The products of the output layer, by chunks: forward, again if the loss recomputes them, and backward
    for states and weight, whose gradient is zeroed, added to in float32, and rounded; and the loss. A reward
    takes almost no time."""
    if not rank.words:
        return 0.0
    dim, chunks = rank.model.dim, -(-rank.tokens // CHUNK_TOKENS)
    chunk = rank.tokens / chunks
    products = (2 + rank.objective.recomputes_logits) * rank.product(chunk, dim, rank.words)
    products += rank.product(chunk, dim, rank.words, 8 * dim * rank.words)
    # kernels read logits for sums, which a backward pass makes again, and turn them into their gradient
    accesses = (3 + rank.objective.recomputes_logits) * rank.b + 4 * rank.objective.logit_accesses
    gradient = (8 + rank.b) * dim * rank.words * (rank.trained.head > dim)
    return chunks * (products + rank.moved(accesses * chunk * rank.words)) + rank.moved(gradient)


def sums_of_output(rank: RankWork) -> float:
    """Two sums of a number per token over the shares of the vocabulary, and that of the states' gradient."""
    if not rank.words:
        return 0.0
    chunks = -(-rank.tokens // CHUNK_TOKENS)
    return 2 * chunks * rank.sent("all-reduce", 4 * rank.tokens / chunks, rank.tp, 1) + rank.summed_over_tp


def teacher(rank: RankWork) -> float:
    """The forward passes of a teacher's layers, and its logits."""
    model = rank.teacher.model
    words = rank.product(rank.tokens, model.dim, model.vocab_size / rank.tp)
    return model.layer_runs * rank.teacher.forward + words


def teacher_exchanges(rank: RankWork) -> float:
    """Those of its layers, which go forward only."""
    each = tensor_parallel(rank.teacher) + context_parallel(rank.teacher)
    return rank.teacher.model.layer_runs * each / 2


def teacher_gathers(rank: RankWork) -> float:
    count, layers = rank.teacher.count, rank.teacher.model.n_layers
    whole = layers * count.layer + count.embedding + count.head
    return rank.over_fsdp(whole, 0.0) if rank.shards > 1 else 0.0


def copies(rank: RankWork) -> float:
    """The copies around FSDP's gathers and reductions. A rank rounds its shard and copies it into a buffer,
    and the gathered buffer into weights. Gradients, which a pipeline has summed in float32, are copied into a
    buffer in float32; with a single shard, their mean is a copy, too."""
    gathered, reduced = rank.gathered_and_reduced
    gradient = 4 if rank.piped else rank.b  # bytes
    size = (2 * rank.b + (2 * rank.b + rank.rounded) / rank.shards) * gathered
    return rank.moved(size + (gradient + 4 + 8 * (rank.shards == 1)) * reduced)


def weights_alone(rank: RankWork) -> float:
    """The weights of a process alone, rounded once a step; of adapters, next to nothing."""
    return rank.moved(rank.rounded * rank.parameters) if rank.processes == 1 and not rank.frozen else 0.0


def sums(rank: RankWork) -> float:
    """Gradients, added to those of earlier micro-batches in float32: shards; in a pipeline and on a process
    alone, those of whole weights, of which the first are widened. Those of adapters take next to nothing."""
    if rank.frozen:
        return 0.0
    whole, further = rank.piped or rank.processes == 1, rank.micro_batches - 1
    size = rank.rounded + (8 + rank.b) * further if whole else 12 * further / rank.shards
    return rank.moved(size * rank.parameters)


def sends(rank: RankWork) -> float:
    """The states of a micro-batch that a pipeline's stages send and receive, and their gradients."""
    ends = 4 * len(rank.stage_layers) - 2 * rank.first - 2 * rank.last
    return ends * rank.sent("send", rank.states / rank.spread, 2, rank.processes // rank.pp)


def update(rank: RankWork) -> float:
    """Clipping of gradients, which reads them for their norm, and reads and writes them once more; and the
    optimizer. A kernel reads weights, gradients and states, and writes all but the gradients; Muon leaves a
    part to that of AdamW. Not counted: products of Muon and SOAP, the squares of SOAP, what Muon gathers and
    orthogonalises beyond its shard, and Sophia's extra pass."""
    optimizer, trained = rank.segment.optimizer, rank.trained
    facts = OPTIMIZERS[optimizer.name or "ademamix"]
    kernel = 3 * 4 + 2 * WIDTHS[optimizer.state_dtype or "float32"] * facts.states[1]
    own = kernel if facts.kernel else 4 * facts.accesses
    others = trained.total - trained.matrices if facts.matrices_only else 0.0
    moved = CLIPPED * trained.total + own * (trained.total - others) + kernel * others
    return rank.moved(moved / rank.shards)


TIMES: dict[str, Callable[[RankWork], float]] = {
    "layers": lambda rank: rank.micro_batches * rank.runs,
    "embedding": lambda rank: rank.micro_batches * rank.first,
    "output": lambda rank: rank.micro_batches * rank.last,
    "teacher": lambda rank: rank.micro_batches * rank.last * (rank.segment.teacher_beside is not None),
    "pipeline": lambda rank: rank.micro_batches * rank.piped,
    # FSDP gathers for every micro-batch, in a pipeline once
    "weights": lambda rank: 0 if rank.processes == 1 else 1 if rank.piped else rank.micro_batches,
    "step": lambda rank: 1,
}
"""How often a step has a term: for each micro-batch, where the rank has such layers."""


class Term(NamedTuple):
    """A term of the time of a rank's step."""

    name: str
    part: str  # of the step: "compute"; "waited"; "beside", collectives that computation may hide
    times: str  # of `TIMES`
    seconds: Callable[[RankWork], float]


TERMS = (
    # forward, and backward for the gradients of inputs and of trained matrices
    Term("products", "compute", "layers", lambda rank: sum(rank.products) * (2 if rank.frozen else 3)),
    # the backward kernel computes five products where the forward kernel has two
    Term("scores", "compute", "layers", lambda rank: rank.scores * (1 + 5 / 2)),
    Term("Mamba-2", "compute", "layers", lambda rank: 3 * rank.mixing),
    Term("memory-bound operators", "compute", "layers", lambda rank: sum(rank.accesses)),
    Term("recomputation", "compute", "layers", recomputed),
    Term("tensor parallelism", "waited", "layers", tensor_parallel),
    Term("context parallelism", "waited", "layers", context_parallel),
    Term("embedding", "compute", "embedding", lambda rank: rank.moved(4 * rank.states)),
    Term("sum of embeddings", "waited", "embedding", lambda rank: rank.summed_over_tp),
    Term("last norm", "compute", "output", lambda rank: rank.moved(6 * rank.states)),
    Term("logits and loss", "compute", "output", logits),
    Term("sums of the output", "waited", "output", sums_of_output),
    Term("teacher", "compute", "teacher", teacher),
    Term("exchanges of the teacher", "waited", "teacher", teacher_exchanges),
    Term("gathers of the teacher", "beside", "teacher", teacher_gathers),
    Term("FSDP", "beside", "weights", lambda rank: rank.over_fsdp(*rank.gathered_and_reduced)),
    Term("copies around FSDP", "compute", "weights", copies),
    Term("sums over micro-batches", "compute", "step", sums),
    Term("sends of a pipeline", "waited", "pipeline", sends),
    Term("weights of a process alone", "compute", "step", weights_alone),
    Term("update", "compute", "step", update),
)
"""The time of a rank's step, term by term."""


def of_step(segment: Segment, processes: int, rates: Rates) -> StepTime:
    """The time of a step on `processes` GPUs; the layout must fit. Ranks with as many layers take the same
    time, but for the first and the last."""
    ranks = [RankWork(segment, processes, rank, rates) for rank in range(segment.parallel.pp)]
    unlike = {(rank.layers, rank.first, rank.last): rank for rank in ranks}
    return max(map(_time, unlike.values()), key=lambda time: time.total)


def of_rank(segment: Segment, processes: int, rank: int, rates: Rates) -> StepTime:
    """The time of a step on the GPUs with index `rank` in their pipeline."""
    return _time(RankWork(segment, processes, rank, rates))


def _time(rank: RankWork) -> StepTime:
    parts = dict.fromkeys(("compute", "waited", "beside"), 0.0)
    for term in TERMS:
        if times := TIMES[term.times](rank):
            parts[term.part] += times * term.seconds(rank)
    waited = parts["waited"] + max(0.0, parts["beside"] - parts["compute"])
    return StepTime(parts["compute"], waited, bubble(rank.parallel, rank.micro_batches))


@cache
def _nodes(number: int, stride: int, gpus_per_node: int) -> int:
    """The number of nodes of a group of `number` ranks that lie `stride` apart."""
    return len({index * stride // gpus_per_node for index in range(number)})
