"""Floating-point operations of training, scoring and sampling, from the shapes alone.

The convention of the Apertus report (appendix E), which is that of PaLM (arXiv 2204.02311, appendix B) and
Megatron-LM (arXiv 2104.04473, appendix): a multiply-add is two operations, a backward pass is two forward
passes, and only matrix products count. With L layers of width D, queries Q = heads x head_dim, keys K,
feed-forward F, V words and sequences of S tokens, a token costs

    forward = L (2 D Q + 4 D K + 2 Q D + 4 D F   + 4 Q S) + 2 V D          training = 3 forward
                 projections and feed-forward      scores     output

(6 D F with SwiGLU, which has a third matrix; 2 D more for each state in a sum of a layer schedule, whose
layers count as often as they run, and their scores once for each sequence of keys). Training thus costs
6 N + 12 L Q S, with N parameters in matrices without the input embedding. Scores are counted in full: the
savings of the causal mask and of document boundaries are ignored (factor 1, not 1/2); sparse attention
counts its share of the scores, and a layer of Mamba-2 counts what `Mamba.products` says. Training 70B
parameters on 15T tokens in sequences of 4,096 takes 6.74e24 operations, as published.

Invariant: recomputation is never part of `training`: utilisation (MFU) is measured in model FLOPs, so
activation checkpointing lowers it. `training` and `recomputation` agree with torch's FlopCounterMode on the
real model (`tests/apertus_model/trainer/test_flop_model.py`).
"""

from dataclasses import dataclass

from flows.planning.estimate.sizes import adapters, layers_of_rank
from specs.capabilities import OBJECTIVES
from specs.cluster import Gpu
from specs.mamba import OWN
from specs.model import ModelSpec
from specs.stages.training import Segment
from specs.trainable import MATRICES, sizes, trained, untouched

# name prefixes of the matrices with which attention, or the mixer in its place, reads its input
MIXER_INPUTS = ("qkv", "z_proj", "dt_proj")


@dataclass(frozen=True)
class Forward:
    """Operations of one forward pass, per token."""

    projections: int  # all matrices of the layers
    scores: int  # queries by keys, and weights by values
    output: int  # logits
    sums: int = 0  # of states, with the weights of a schedule
    scans: int = 0  # of layers that mix tokens by Mamba-2, beside their projections

    @property
    def total(self) -> int:
        return self.projections + self.scores + self.output + self.sums + self.scans


def forward(model: ModelSpec, sequence_length: int) -> Forward:
    """The operations of one forward pass, with the logits of all tokens."""
    mixers = len(model.mamba_layers)
    return Forward(
        2 * (model.layer_runs * model.layer_matrices + mixers * model.mamba_matrices),
        model.score_runs * 2 * int(model.scores(sequence_length)),
        2 * model.outputs * model.dim,
        2 * model.sum_weights * model.dim,
        2 * mixers * model.mamba_products(sequence_length),
    )


def scored(model: ModelSpec, tokens: float, sequence_length: float) -> int:
    """The operations of a forward pass over `tokens` tokens in sequences of that length, with all logits."""
    once = forward(model, 1)
    scores = model.score_runs * 2 * model.scores(sequence_length)
    scans = forward(model, max(1, int(sequence_length))).scans
    return round(tokens * (once.projections + once.sums + scores + scans + once.output))


def prefill(model: ModelSpec, tokens: float) -> int:
    """The operations of reading a prompt of `tokens` tokens into the key-value cache, with the logits of the
    last token."""
    once = forward(model, 1)
    scans = 2 * len(model.mamba_layers) * model.mamba_reading(tokens)
    return round(tokens * (once.projections + once.sums + once.scores * tokens) + scans + once.output)


def decode(model: ModelSpec, prompt: float, tokens: float) -> int:
    """The operations of completing a prompt in the key-value cache by `tokens` tokens, one at a time. The
    prefill gives the first token, and the last one is not read: step i of tokens - 1 sees prompt + i keys."""
    once, steps = forward(model, 1), max(0.0, tokens - 1)
    keys = steps * prompt + steps * (steps + 1) / 2
    scans = 2 * len(model.mamba_layers) * model.mamba_reading(1)
    return round(steps * (once.projections + once.sums + scans + once.output) + keys * once.scores)


def training(segment: Segment) -> int:
    """The operations of training per token, without recomputation, with the forward pass of a teacher. With
    LoRA, the frozen matrices have no weight gradient, and neither constants nor what is below the first
    adapter of the first layer have gradients."""
    if segment.compared is not None:
        return aligned_teacher(segment) + aligned_student(segment)
    model, once = segment.model, forward(segment.model, segment.sequence_length)
    below = 2 * len(model.mamba_layers) * model.mamba_constants(segment.sequence_length)
    if (lora := segment.adapters) is None:
        passes_back = backward(segment) if segment.trainable else 2 * once.total - below
        return once.total + passes_back + teacher(segment) + products(segment)
    adapted = 2 * model.layer_runs * adapters(model, lora.rank, lora.targets)
    if {"wq", "wk", "wv"} <= set(lora.targets):
        below += 2 * model.dim * (model.query_dim + 2 * model.key_dim) + 3 * 2 * lora.rank * model.dim
        if model.mamba is not None and 0 in model.mamba_layers:  # decays and gates have no gradients either
            passed = model.mamba.passed_on(model.n_heads, model.head_dim, segment.sequence_length)
            below += 2 * (model.mamba_matrices + (int(passed) if model.mamba.decay else 0))
    products_of_tokens = once.scores + once.scans
    return 2 * (once.projections + once.output + once.sums) + 3 * (products_of_tokens + adapted) - below


def backward(segment: Segment) -> int:
    """The operations per token of a backward pass in which only some parameters are trained: a matrix costs
    as much as its forward pass for its own gradient, and as much again for the gradient of its input, if that
    depends on a trained parameter."""
    model, length = segment.model, segment.sequence_length
    own, every = trained(model, segment.trainable), sizes(model)
    total = 0

    def products(prefix: str, of_input: bool) -> bool:
        """Counts the matrices whose names begin with `prefix`, which read the same input; `of_input`: whether
        it has a gradient. Returns whether their outputs have one."""
        nonlocal total
        for name, size in every.items():
            if name.startswith(prefix) and any(part in name for part in MATRICES):
                total += 2 * size * ((name in own) + of_input)
        return of_input or any(name.startswith(prefix) for name in own)

    def attention(layer: str, stream: bool, reads: int) -> bool:
        nonlocal total
        normed = stream or f"{layer}_norm.weight" in own
        inputs = [products(f"{layer}.{name}", normed) for name in MIXER_INPUTS]
        others = ("q_norm.weight", "k_norm.weight", *OWN)
        mixed = any(inputs) or any(f"{layer}.{name}" in own for name in others)
        scores = int(model.scores(length)) * (1 + reads)
        scans = 2 * model.mamba_products(length) - model.mamba_constants(length)
        total += mixed * 2 * (scans if f"{layer}.d" in every else 2 * scores)
        return products(f"{layer}.wo", mixed)

    def feed_forward(layer: str, stream: bool) -> bool:
        normed = stream or f"{layer}.ffn_norm.weight" in own
        wide = [products(f"{layer}.feed_forward.{name}", normed) for name in ("gate", "up")]
        activation = any(name.startswith(f"{layer}.feed_forward.act.") for name in own)
        return products(f"{layer}.feed_forward.down", activation or any(wide))

    stream = "tok_embeddings.weight" in own  # whether the residual stream has a gradient
    for number, step in enumerate(model.schedule, 1):
        layers = [f"layers.{index}" for index in step.layers]
        added = [attention(f"{layer}.attention", stream, len(step.reads)) for layer in layers]
        stream |= any(added)
        added = [feed_forward(layer, stream) for layer in layers]
        stream |= any(added) or (step.normed and "schedule.norm.weight" in own)
        weighted = f"schedule.sums.{number}.weight" in own
        total += 2 * 2 * len(step.summed) * model.dim * (stream or weighted)
        stream |= weighted
    head = next(reversed(own), "").startswith("lm_head")
    return total + 2 * model.outputs * model.dim * (head + (stream or "norm.weight" in own))


def teacher(segment: Segment) -> int:
    """The operations per token of a teacher's forward pass beside the student; part of `training`."""
    model = segment.teacher_beside
    return forward(model, segment.sequence_length).total if model is not None else 0


def aligned_teacher(segment: Segment) -> int:
    """The operations per token of a teacher with whose attention mixers are compared
    (`trainer/objectives/alignment.py`): attention of every layer up to the last compared one, and the
    feed-forward of the layers before it; for a comparison of matrices, also projections and scores of the
    compared layers again."""
    model, length = segment.teacher_beside, segment.sequence_length
    assert model is not None, "attention is compared with that of a teacher"
    compared = segment.model.mamba_layers
    projections = 2 * model.dim * (model.query_dim + 2 * model.key_dim)
    attention = projections + 2 * model.query_dim * model.dim + 2 * int(model.scores(length))
    feed_forward = 2 * model.ffn_matrices * model.dim * model.ffn_dim
    total = (compared[-1] + 1) * attention + compared[-1] * feed_forward
    if segment.compared == "matrix":
        total += len(compared) * (projections + 2 * model.query_dim * length)
    return total


def aligned_student(segment: Segment) -> int:
    """The operations per token of all compared mixers, whose inputs have no gradients: forward once; backward
    once for each trained matrix, and twice for products and for the output projection, whose input has a
    gradient. There is no recomputation, and nothing else of the student runs."""
    model, length = segment.model, segment.sequence_length
    keys, queries = 2 * model.dim * model.key_dim, 2 * model.dim * model.query_dim
    steps, mixed = 2 * model.dim * model.decayed_heads, 2 * model.mamba_products(length)
    if segment.compared == "matrix":  # which depends on neither values nor gates
        mixer = 2 * (queries + keys + steps) + keys + 3 * 2 * model.query_dim * length
    else:
        mixer = 2 * (2 * queries + 2 * keys + steps) + 3 * (queries + mixed)
        mixer -= 2 * model.mamba_constants(length)
    return len(model.mamba_layers) * mixer


def products(segment: Segment) -> int:
    """The operations per token of the inner products between the goal and the gradients that a step computes
    separately; part of `training`. Their norms are not counted, as for any gradient."""
    if not segment.weighted:
        return 0
    parameters = sum(trained(segment.model, segment.trainable).values())
    return 2 * len(segment.weighted) * parameters // segment.tokens_per_step


def recomputation(segment: Segment) -> int:
    """The operations per token of recomputation in the backward pass, not part of `training`. full: every
    layer; selective: every second product, which are keys, the output projection of attention and one matrix
    of the feed-forward, and for Mamba-2 also the step sizes; memory_budget: at most the share that is
    not kept; objectives that recompute them: always the logits."""
    model, once = segment.model, forward(segment.model, segment.sequence_length)
    layers = once.projections + once.scores + once.scans
    second = model.layer_runs * 2 * model.dim * (model.key_dim + model.query_dim + model.ffn_dim)
    again = {
        "none": 0,
        "selective": second + len(model.mamba_layers) * 2 * model.dim * model.decayed_heads,
        "full": layers,
        "memory_budget": round((1 - segment.memory_budget) * layers),
    }[segment.activation_checkpointing]
    runs = model.layer_runs
    again = again * (runs - untouched(model, segment.trainable)) // max(1, runs)
    return again + (once.output if OBJECTIVES[segment.objective].recomputes_logits else 0)


def peak(segment: Segment, gpu: Gpu) -> float:
    """The peak operations per second of a GPU for a segment's mix of operations: with `precision.linear`, the
    matrices of the layers run at the rate of float8, scores and output at that of bfloat16."""
    if segment.precision.linear == "param" or gpu.float8_flops is None:
        return gpu.bf16_flops
    once = forward(segment.model, segment.sequence_length)
    # per pass: training has three, the teacher one
    rest = once.scores + once.scans + once.output + once.sums + teacher(segment) / 3
    seconds = once.projections / gpu.float8_flops + rest / gpu.bf16_flops
    return (once.projections + rest) / seconds


def of_rank(segment: Segment, processes: int, rank: int) -> float:
    """The operations of one step, with recomputation, on each GPU with index `rank` in its pipeline."""
    model, parallel = segment.model, segment.parallel
    whole = training(segment) + recomputation(segment)
    if parallel.pp == 1:
        return segment.tokens_per_step * whole / processes
    empty = model.without_method.model_copy(update={"n_layers": 0, "mamba": None})
    none = segment.model_copy(update={"model": empty})
    output = training(none) + recomputation(none)
    layers = sum(layers_of_rank(model.n_layers, parallel.stages, parallel.pp, rank))
    own = (whole - output) * layers / model.n_layers + output * (rank == parallel.pp - 1)
    return segment.tokens_per_step * own / (processes // parallel.pp)
