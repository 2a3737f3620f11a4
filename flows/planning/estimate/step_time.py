"""Estimates the seconds of a training step from the shapes alone: the sums of a rehearsal without its
operators, so that thousands of layouts can be compared.

A step takes the time of a rank's matrix products, attention and memory-bound operators, one after the other,
of the collectives that are waited for, and of the pipeline's bubble. FSDP's collectives overlap with
computation; those of tensor, context and pipeline parallelism are waited for, except for the time that
async_tp hides. Rates and their sources are those of a rehearsal (`apertus_model.rehearsal.rates`).

Invariants: a pure function of shapes, layout and rates. `PASSES` and `COMPILED` follow from the operators of
the model: a change that fuses some of them must change both. `tests/flows/execution/test_rehearsal.py`
compares the sum with that of a rehearsal. Host time is not included.

Shapes: as in `sizes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

from apertus_model.rehearsal.rates import Rates, hidden_seconds, unmasked
from apertus_model.rehearsal.records import PAIRS
from flows.planning.estimate.layer_memory import mixing
from flows.planning.estimate.sizes import RankSizes, layers_of_rank
from specs.capabilities import CHUNK_TOKENS, OPTIMIZERS
from specs.launch import Parallel
from specs.stages.training import Segment


class Passes(NamedTuple):
    """The number of times that memory-bound operators read or write a tensor, in elements of the parameters'
    precision."""

    forward: float
    backward: float


# By the width of the tensors that they read or write, per layer and token.
PASSES = {
    "residual": Passes(10, 12),  # norms and sums; shared by ranks with sequence parallelism
    "whole": Passes(0, 6),  # gradients that several matrices give their input
    "heads": Passes(4, 5),  # norm and RoPE of queries and keys, one kernel each
    "xielu": Passes(2, 3),  # one kernel
    "swiglu": Passes(5, 12),
    "gather": Passes(4, 4),  # sequence parallelism: pieces are copied together before and after an exchange
}
# `PASSES` for compiled layers, whose operators between two products are one kernel.
COMPILED = {
    "residual": Passes(9, 10),
    "whole": Passes(0, 7),
    "heads": PASSES["heads"],
    "xielu": PASSES["xielu"],
    "swiglu": Passes(5, 7),
    "gather": PASSES["gather"],
}
# Bytes that casts to float8 read or write, per element of a multiplied tensor, forward and backward: weights,
# inputs of linear layers, and gradients of their outputs. A compiler casts an input of several layers only
# once. A maximum over a tensor is a pass of its own, unless it is part of the kernel that makes the tensor.
CASTS = {"weights": Passes(31, 33), "inputs": Passes(31, 33), "gradients": Passes(0, 33)}
COMPILED_CASTS = {"weights": Passes(5, 6), "inputs": Passes(3.5, 4.5), "gradients": Passes(0, 5)}
# bytes per parameter: copies around FSDP's gathers and reductions, and a pipeline's sum over micro-batches
GATHERED, REDUCED, SUMMED = 4.0, 6.0, 16.0


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


def of_step(segment: Segment, processes: int, rates: Rates) -> StepTime:
    """The time of a step on `processes` GPUs; the layout must fit."""
    work = _Work(segment, processes, rates)
    ranks = [work.rank(rank) for rank in range(segment.parallel.pp)]
    return max(ranks, key=lambda time: time.total)


def of_rank(segment: Segment, processes: int, rank: int, rates: Rates) -> StepTime:
    """The time of a step on the GPUs with index `rank` in their pipeline."""
    return _Work(segment, processes, rates).rank(rank)


class _Work(RankSizes):
    """The work of a layout."""

    def __init__(self, segment: Segment, processes: int, rates: Rates) -> None:
        super().__init__(segment, processes)
        self.rates = rates
        self.split = self.parallel.sequence_parallel and self.tp > 1
        self.again = segment.activation_checkpointing
        self.float8 = segment.precision.linear != "param"
        self.trains = segment.adapters is None
        # tokens that attend to each other: a rehearsal's row is one document, or `pairs` completions
        pairs = 1 if self.objective.rows == "tokens" else 2 * PAIRS
        self.length = -(-segment.sequence_length // pairs)

    # Exchanges. Ranks are numbered with tp innermost, then cp, dp_shard, dp_replicate and pp.

    def _sent(self, kind: str, size: float, number: int, stride: int) -> float:
        return self.rates.between(kind, size, number, _nodes(number, stride, self.rates.gpus_per_node))

    def over_tp(self, kind: str, width: float) -> float:
        """The seconds of an exchange of whole tensors with `width` bytes per token."""
        return self._sent(kind, self.tokens * width, self.tp, 1)

    def over_cp(self, kind: str, size: float) -> float:
        return self._sent(kind, size, self.cp, self.tp)

    def over_fsdp(self, gathered: float, reduced: float) -> float:
        """The seconds of FSDP's gathers of `gathered` parameters and reductions of `reduced` ones, the
        numbers that a rank would have without FSDP."""
        tp, replicas = self.tp, self.parallel.dp_replicate
        seconds = self._sent("all-gather", self.b * gathered, self.shards, tp)
        seconds += self._sent("reduce-scatter", 4 * reduced, self.shards, tp)
        return seconds + self._sent("all-reduce", 4 * reduced / self.shards, replicas, tp * self.shards)

    # Operators.

    def product(self, tokens: float, inputs: float, outputs: float, result: float | None = None) -> float:
        """The seconds of a product with a matrix of this rank. `result`: bytes that it adds to."""
        b = self.b
        moved = b * (tokens * inputs + inputs * outputs + tokens * outputs) + (result or 0.0)
        return self.rates.compute(2 * tokens * inputs * outputs, moved, "matrix", b)

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
        tokens = self.tokens
        return [
            self.rates.compute(
                2 * tokens * a * b, tokens * a + a * b + self.b * tokens * b, "matrix", 1
            )
            for a, b in self.sides
        ]  # fmt: skip

    @cached_property
    def matrices(self) -> tuple[float, float]:
        """The seconds of a layer's products, forward, and of those that selective recomputation repeats."""
        return sum(self.products), sum(self.products[1::2])

    def casts(self) -> Passes:
        """Casts of a layer to float8, in seconds."""
        if not self.float8:
            return Passes(0, 0)
        compiled = self.segment.compile
        read = [a for a, _ in self.sides]
        shared = [read[0], read[3], read[4], read[-1]] if compiled else read
        sizes = {
            "weights": sum(a * b for a, b in self.sides),
            "inputs": self.tokens * sum(shared),
            "gradients": self.tokens * sum(b for _, b in self.sides),
        }
        return self.accesses(COMPILED_CASTS if compiled else CASTS, sizes)

    @cached_property
    def attention(self) -> float:
        """The seconds of a layer's scores, forward; the mean of layers that see different numbers of keys."""
        model, tp, cp = self.model, self.tp, self.cp
        seen = model.score_runs / max(1, model.layer_runs)
        flops = 2 * self.tokens * model.scores(self.length) * seen / tp * unmasked(1, cp)
        moved = 2 * self.b * self.tokens * (model.query_dim + model.key_dim * cp * seen) / tp
        return self.rates.compute(flops, moved, "attention", self.b)

    @cached_property
    def mixing(self) -> float:
        """The seconds that Mamba-2 takes in place of scores, forward, averaged over all layers: gates, step
        sizes, and products by chunks in float32, of which each tensor that is kept is written and read."""
        model, tp = self.model, self.tp
        if model.mamba is None:
            return 0.0
        gates, steps = (
            self.product(self.tokens, model.dim, n / tp) for n in (model.query_dim, model.n_heads)
        )
        kept = mixing(model, self.tokens / self.rows, self.b, tp)
        flops = 2 * self.tokens * model.mamba_products(self.length) / tp
        scan = self.rates.compute(flops, 2 * self.tokens * kept, "matrix", 4)
        return (gates + steps + scan) * len(model.mamba_layers) / model.n_layers

    def passes(self) -> Passes:
        """Memory-bound operators of a layer, in seconds."""
        model, tp = self.model, self.tp
        widths = {
            "residual": model.dim / self.spread,
            "whole": model.dim,
            "heads": (model.query_dim + model.key_dim) / tp * (1 if model.qk_norm else 0.5),
            model.activation: model.ffn_dim / tp,
            "gather": 2 * model.dim * self.split,
        }
        scale, passes = self.b * self.tokens, COMPILED if self.segment.compile else PASSES
        casts, accesses = self.casts(), self.accesses(passes, widths, scale)
        return Passes(casts.forward + accesses.forward, casts.backward + accesses.backward)

    def accesses(self, passes: Mapping[str, Passes], sizes: Mapping[str, float], scale: float = 1) -> Passes:
        """The seconds of reading and writing tensors of these sizes, `scale` bytes for each unit of size."""
        return Passes(
            self.moved(scale * sum(passes[name].forward * size for name, size in sizes.items())),
            self.moved(scale * sum(passes[name].backward * size for name, size in sizes.items())),
        )

    def layer(self) -> tuple[float, float]:
        """The seconds of computation and of waiting of a layer, for one micro-batch."""
        products, repeated = self.matrices
        passes, scores = self.passes(), self.attention
        compute = products * (3 if self.trains else 2) + scores * (1 + 5 / 2) + sum(passes) + 3 * self.mixing
        every = products + scores + self.mixing + passes.forward
        compute += {"none": 0.0, "selective": repeated + passes.forward, "full": every}[self.again]
        return compute, self.layer_exchanges()

    def layer_exchanges(self) -> float:
        model, repeats = self.model, self.again != "none"
        seconds = 0.0
        if self.tp > 1:
            whole = self.b * model.dim
            joined = len(model.schedule) / max(1, model.layer_runs)  # layers of one step send one sum
            if self.split:
                gather, scatter = self.over_tp("all-gather", whole), self.over_tp("reduce-scatter", whole)
                seconds += 2 * (1 + joined) * (gather + scatter)
                seconds += 2 * repeats * gather + 2 * (self.again == "full") * joined * scatter
                if self.parallel.async_tp:
                    seconds -= self.hidden(gather, scatter)
            else:
                seconds += (2 + 2 * joined * (1 + repeats)) * self.over_tp("all-reduce", whole)
            small = 2 if self.split else 4  # gradients of norms, and of xIELU's scalars
            seconds += small * self._sent("all-reduce", 0, self.tp, 1)
        if self.cp > 1:
            keys = self.b * self.rows * self.segment.sequence_length * model.key_dim / self.tp
            seconds += 2 * (1 + repeats) * self.over_cp("all-gather", keys)
            seconds += 2 * self.over_cp("reduce-scatter", keys)
        return seconds

    def hidden(self, gather: float, scatter: float) -> float:
        """The seconds of a layer's exchanges over tensor-parallel ranks that are hidden by the products that
        read or made the tensors sent. A cast to float8 needs all of its input, so it hides no gather, and the
        sum of several products hides nothing."""
        *reads, output = self.products[:4]
        *up, down = self.products[4:]
        parts, repeats, full = self.tp, self.again != "none", self.again == "full"

        def beside(collective: float, products: list[float]) -> float:
            hidden = 0.0
            for product in products:
                hidden += hidden_seconds(collective - hidden, product, parts)
            return hidden

        seconds = (1 + full) * (beside(scatter, [output]) + beside(scatter, [down]))
        seconds += beside(scatter, up) * (len(up) == 1)
        if not self.float8:
            seconds += (1 + repeats) * (beside(gather, reads) + beside(gather, up))
            seconds += beside(gather, [output] * 2) + beside(gather, [down] * 2)
        return seconds

    def output(self) -> tuple[float, float]:
        """The seconds of computation and of waiting of output layer and loss, for one micro-batch."""
        model, tp = self.model, self.tp
        if model.head == "reward":  # only a few products with one vector
            return self.moved(6 * self.b * self.tokens * model.dim), 0.0
        words, chunks = model.vocab_size / tp, -(-self.tokens // CHUNK_TOKENS)
        chunk = self.tokens / chunks
        products = 2 * self.product(chunk, model.dim, words)
        products += self.product(chunk, model.dim, words, 8 * model.dim * words)  # adds in float32
        if self.objective.recomputes_logits:
            products += self.product(chunk, model.dim, words)
        compute = chunks * (products + self.moved(self.objective.logit_accesses * 4 * chunk * words))
        compute += self.moved(6 * self.b * self.tokens * model.dim)
        waited = 0.0
        if tp > 1:
            waited = 2 * chunks * self._sent("all-reduce", 4 * chunk, tp, 1)
            waited += self.over_tp("reduce-scatter" if self.split else "all-reduce", self.b * model.dim)
        return compute, waited

    def teacher(self) -> tuple[float, float, float]:
        """The seconds of computation and of waiting, and the parameters, of a teacher's forward pass over a
        micro-batch: its layers and its logits."""
        if (model := self.segment.teacher_beside) is None:
            return 0.0, 0.0, 0.0
        alone = {"model": model, "top_k": 1, "activation_checkpointing": "none", "compile": False}
        work = _Work(self.segment.model_copy(update=alone), self.processes, self.rates)
        layer = sum(work.products) + work.attention + work.mixing + work.passes().forward
        words = model.vocab_size / self.tp
        compute = model.layer_runs * layer + work.product(self.tokens, model.dim, words)
        count = work.count
        held = model.n_layers * count.layer + count.embedding + count.head
        return compute, model.layer_runs * work.layer_exchanges() / 2, held

    def rank(self, rank: int) -> StepTime:
        """The time of a step on the ranks with this index in their pipeline."""
        model, parallel, count = self.model, self.parallel, self.count
        pp, many = parallel.pp, self.micro_batches
        layers = sum(layers_of_rank(model.n_layers, parallel.stages, pp, rank))
        runs = layers if pp > 1 else model.layer_runs
        first, last = rank == 0, rank == pp - 1
        compute, waited = (many * runs * seconds for seconds in self.layer())
        if last:
            more, longer = self.output()
            compute, waited = compute + many * more, waited + many * longer
        more, longer, held = self.teacher() if last else (0.0, 0.0, 0.0)
        compute, waited = compute + many * more, waited + many * longer
        if first:
            compute += many * self.moved(4 * self.b * self.tokens * model.dim)
            if parallel.tp > 1:
                kind = "reduce-scatter" if self.split else "all-reduce"
                waited += many * self.over_tp(kind, self.b * model.dim)
        own = layers * count.layer + count.embedding * first + count.head * last
        hidden, times = 0.0, 1 if pp > 1 else many
        if held and self.shards > 1:
            hidden += many * self.over_fsdp(held, 0.0)
        if self.shards > 1 or parallel.dp_replicate > 1:
            again = max(0, runs - layers) * count.layer  # each run gathers, and reduces
            twice = own + again + (runs * count.layer if pp == 1 else 0.0)  # forward and backward
            reduced = own + again if self.trains else 0.0
            hidden += times * self.over_fsdp(twice, reduced)
            compute += times * self.moved(GATHERED * twice + REDUCED * reduced)
        if pp > 1:
            compute += many * self.moved(SUMMED * own)
            stages = parallel.stages // pp
            ends = 4 * stages - 2 * first - 2 * last  # sends and receives of a micro-batch, both ways
            size = self.b * self.tokens * model.dim / self.spread
            waited += many * ends * self._sent("send", size, 2, self.processes // pp)
        states = max(OPTIMIZERS[self.segment.optimizer.name or "ademamix"].states) if self.trains else 0
        compute += self.moved((12 + 8 * (2 + states)) * own / self.shards)
        return StepTime(compute, waited + max(0.0, hidden - compute), bubble(parallel, many))


@cache
def _nodes(number: int, stride: int, gpus_per_node: int) -> int:
    """The number of nodes of a group of `number` ranks that lie `stride` apart."""
    return len({index * stride // gpus_per_node for index in range(number)})
