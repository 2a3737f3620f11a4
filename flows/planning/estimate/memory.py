"""Estimates the memory of one GPU in a training step, as a table of terms from the shapes alone.

FSDP shards float32 weights and optimizer states, and gathers weights for computation in the parameters'
precision, group by group: embedding, each layer, last norm with output projection. A process alone has
copies of all weights in that precision. Every term states the
moments at which it is in memory, and the part of `Memory` that it counts as. The peak is the largest of the
moments' sums.

Invariants: a pure function of shapes and layout. With `device="cpu"` it agrees with torch's allocations for
several shapes and layouts (`tests/apertus_model/trainer/test_memory_model.py`). `device="cuda"` differs in
two operators: the fused RMSNorm keeps its input, where the CPU's keeps two float32 copies, and attention
keeps no mask. Not counted: CUDA context, workspaces of libraries and fragmentation, for which `specs.cluster`
leaves room.

Shapes: as in `layer_memory`, and V words on this rank.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from flows.planning.estimate.layer_memory import Device
from flows.planning.estimate.rank import Rank
from flows.planning.estimate.sizes import state_bytes
from specs.capabilities import OPTIMIZERS
from specs.stages.training import Segment

MOMENTS = {
    "loss": "all activations, a chunk of logits, the gradient of the output weight",
    "teacher": "all activations, beside a layer of a teacher that the loss asks",
    "embedding": "all gradients, that of the embedding in full",
    "update": "all gradients and the optimizer's temporaries",
    "backward": "after the output: the last layer's backward pass works on top of all activations",
    "end": "the first layer's backward pass, beside the gradients of all layers",
    "combination": "the gradients of all sources and their sum, where a step has several",
}


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU at the moment of the peak; with a pipeline, of the rank that needs the most."""

    weights: float  # the rank's shard, float32; copies for passes; a table of positions for each stage
    gradients: float  # the rank's shard, float32; in a pipeline also the sums before reduction
    optimizer_states: float
    activations: float  # kept by the forward pass for the backward pass
    working: float  # added by the pass of a layer while it runs
    output: float  # logits of a chunk, gradients of the output weight and of the states
    communication: float  # gathered weights, and gradients during reduction
    update: float  # temporaries of the optimizer
    moment: str  # of the peak, one of `MOMENTS`

    @property
    def total(self) -> float:
        return sum(value for value in asdict(self).values() if isinstance(value, float))

    def to_json(self) -> dict[str, Any]:
        """Whole bytes by part, their `total`, and the `moment`."""
        parts = {name: round(value) for name, value in asdict(self).items() if isinstance(value, float)}
        return {**parts, "total": sum(parts.values()), "moment": self.moment}


def gradients_in_backward(rank: Rank) -> float:
    """Those of earlier micro-batches, or that of the output, which is the first."""
    return max(rank.backward.gradients, 4.0 * rank.trained.head / (1 if rank.piped else rank.shards))


def gradients_at_end(rank: Rank) -> float:
    """All, but for those that the passes of the first layer and of the embedding make."""
    missing = 4.0 * (rank.trained.embedding + rank.alone * rank.trained.layer) / rank.shards
    return max(rank.backward.gradients, rank.backward.gradients_at_end - missing)


def states(rank: Rank) -> float:
    matrices, trained = rank.trained.matrices, rank.trained.total
    partial = rank.segment.trainable and rank.segment.adapters is None
    layers = matrices / rank.count.matrices if partial else rank.layers
    others = (trained - matrices) / rank.shards
    return state_bytes(rank.segment.optimizer, matrices / rank.shards, others, rank.model, layers)


def last_norm(rank: Rank) -> float:
    """The input of the last norm, and its result, gathered along the sequence."""
    width = rank.layer.norm(rank.model.dim / rank.spread) + rank.b * rank.model.dim
    return rank.in_flight[-1] * rank.tokens * width * rank.computes_output


def chunk_of_logits(rank: Rank) -> float:
    """The bytes of a chunk's states, and of its logits. Distillation holds several float32 tensors of their
    size. Other losses hold the logits in the parameters' precision, which kernels of a GPU overwrite by their
    gradient; without kernels, they hold a float32 copy, too."""
    alone = rank.b if rank.device == "cuda" else 6 if rank.b == 2 else 4
    logits = rank.words * (4 * rank.objective.chunk_logits or alone)
    states = rank.model.dim * (4 if rank.device == "cpu" else rank.b) * bool(rank.words)
    return rank.chunk * (logits + states) * rank.computes_output


def output_gradient(rank: Rank) -> float:
    """The float32 sum of the output weight's gradient, unless the norm alone is trained. With gpipe, the
    graphs of all micro-batches hold one."""
    graphs = rank.in_flight[-1] if rank.parallel.pp_schedule == "gpipe" else 1
    table = 4.0 * rank.words * rank.model.dim * rank.computes_output
    return table * graphs * (rank.trained.head > rank.model.dim)


def stage_buffers(rank: Rank) -> float:
    """One for the states, and one for the gradients, of every micro-batch that a stage of a pipeline
    receives."""
    ends = 2 * len(rank.stage_layers) - rank.first - rank.last if rank.piped else 0
    return ends * rank.micro_batches * rank.layer.state


def gathered_by_backward(rank: Rank) -> float:
    """Weights that stay gathered after the backward pass of the layers; in a pipeline in any case."""
    if rank.piped:
        return rank.gathered_stages
    return 0.0 if rank.parallel.reshards else rank.copies * rank.b * rank.count.embedding


def update_temporaries(rank: Rank) -> float:
    """None where the update is one kernel. AdEMAMix on the CPU: the roots of the second moment and the
    numerators of a chunk, float32 copies of bfloat16 moments, and bits to round the largest tensor. Other
    optimizers: one tensor like the parameters."""
    optimizer, trained = rank.segment.optimizer, rank.trained.total / rank.shards
    assert optimizer.name is not None, "the planner resolves the optimizer"
    facts = OPTIMIZERS[optimizer.name]
    if facts.kernel and rank.device == "cuda":
        return 0.0
    if facts.chunk is None:
        return 4.0 * trained
    elements = min(trained, max(facts.chunk, rank.largest_shard))
    rounded = optimizer.state_dtype == "bfloat16"
    return 4.0 * elements * (5 if rounded else 2) + 3 * 4.0 * rank.largest_shard * rounded


class Term(NamedTuple):
    """A term of the memory of a rank."""

    name: str
    part: str  # of `Memory`
    moments: Sequence[str]  # at which it is in memory
    bytes: Callable[[Rank], float]


ALWAYS = tuple(MOMENTS)
FORWARD, PASSES = ("loss", "teacher"), ("backward", "end")
TERMS = (
    Term("shard of the weights", "weights", ALWAYS, lambda rank: 4.0 * rank.parameters / rank.shards),
    Term("weights of passes", "weights", ALWAYS, lambda rank: rank.pass_weights),
    # cosines and sines of RoPE, which the layers of a stage share
    Term("positions", "weights", ALWAYS, lambda rank: len(rank.stage_layers) * rank.positions(rank.model)),
    Term("teacher's shard", "weights", ALWAYS, lambda rank: rank.teacher.shard),
    Term("states", "optimizer_states", ALWAYS, states),
    Term("gradients", "gradients", FORWARD, lambda rank: rank.gradients_at_loss),
    Term("gradients", "gradients", ["backward"], gradients_in_backward),
    Term("gradients", "gradients", ["end"], gradients_at_end),
    Term("gradients", "gradients", ["embedding"], lambda rank: rank.gradient_sums),
    Term("reduced gradients", "gradients", ["update"], lambda rank: rank.gradient_shard),
    # they wait for those of the last source, and all of them for their sum
    Term(
        "gradients of other sources",
        "gradients",
        [*FORWARD, *PASSES, "embedding", "combination"],
        lambda rank: (rank.segment.separate_gradients - 1) * rank.gradient_shard,
    ),
    Term("last source, and sum", "gradients", ["combination"], lambda rank: 2 * rank.gradient_shard),
    Term("kept by layers", "activations", ["loss"], lambda rank: rank.kept[0]),
    # a teacher with whose attention mixers are compared ends before they begin
    Term(
        "kept by layers", "activations", ["teacher"], lambda rank: rank.kept[0] * (not rank.segment.compared)
    ),
    Term("kept by layers", "activations", ["backward"], lambda rank: rank.backward.activations),
    Term("kept by layers", "activations", ["end"], lambda rank: rank.backward.activations_at_end),
    # those that are not passed on, but their sums with earlier states
    Term("summed outputs of layers", "activations", [*FORWARD, "backward"], lambda rank: rank.summed_outputs),
    Term("last norm", "activations", FORWARD, last_norm),
    # for other steps of a layer schedule, less what is freed by then
    Term("gradients of states and keys", "activations", ["backward"], lambda rank: rank.last_step[0]),
    # the teacher reads a micro-batch while the student's output layer waits, and keeps nothing
    Term("layer of the teacher", "working", ["teacher"], lambda rank: rank.teacher.layer),
    Term("last layer", "working", ["backward"], lambda rank: rank.last_step[1]),
    Term("first layer", "working", ["end"], lambda rank: rank.first_layer_works),
    Term("chunk of logits", "output", ["loss"], chunk_of_logits),
    Term("gradient of the output weight", "output", ["loss"], output_gradient),
    # Cross-entropy makes it in the forward pass, and the graph of a micro-batch holds it as long as it lives;
    # losses of log-probabilities make it in the backward pass, and drop it.
    Term(
        "gradient of the output weight",
        "output",
        [*PASSES, "embedding"],
        lambda rank: 0.0 if rank.objective.recomputes_logits else output_gradient(rank),
    ),
    Term(
        "gradient of the last states",
        "output",
        ["loss", *PASSES, "embedding"],
        lambda rank: rank.tokens * rank.model.dim * rank.b * rank.computes_output,
    ),
    Term("teacher's last states", "output", ["loss"], lambda rank: rank.teacher.states),
    Term("buffers of stages", "communication", [*FORWARD, *PASSES, "embedding", "update"], stage_buffers),
    Term("gathered weights", "communication", [*FORWARD, "backward"], lambda rank: rank.gathered_by_forward),
    Term("gathered weights", "communication", ["end", "embedding"], gathered_by_backward),
    Term("gathered weights", "communication", ["update"], lambda rank: rank.gathered_stages * rank.piped),
    Term("gathered output", "communication", FORWARD, lambda rank: rank.gathered_head),
    Term("teacher's gathered output", "communication", ["loss"], lambda rank: rank.teacher.head),
    Term("teacher's gathered layers", "communication", ["teacher"], lambda rank: rank.teacher.layers),
    Term("layers gathered again", "communication", ["backward"], lambda rank: rank.prefetched_layers),
    Term("layers gathered again", "communication", ["end"], lambda rank: rank.last_gathered_layers),
    # the gradients of a group in full, during their reduction; of the embedding, a copy as well
    Term("reduced output", "communication", ["backward"], lambda rank: rank.reduced(rank.trained.head)),
    Term("reduced layer", "communication", ["end"], lambda rank: rank.reduced(rank.trained.layer)),
    Term(
        "reduced embedding",
        "communication",
        ["embedding"],
        lambda rank: rank.reduced(rank.trained.embedding) * (1 if rank.single else 2),
    ),
    Term("temporaries", "update", ["update"], update_temporaries),
    Term("two like the largest tensor", "update", ["combination"], lambda rank: 2 * 4.0 * rank.largest_shard),
)
"""The memory of a rank, term by term."""


def memory_of_step(segment: Segment, processes: int, device: Device = "cuda") -> Memory:
    """The peak memory of a GPU in a step of a segment on `processes` GPUs. The layout must fit
    (`specs.layout`)."""
    ranks = [memory_of_rank(segment, processes, rank, device) for rank in range(segment.parallel.pp)]
    return max(ranks, key=lambda memory: memory.total)


def memory_of_rank(segment: Segment, processes: int, rank: int, device: Device = "cuda") -> Memory:
    """The memory of the GPUs with index `rank` in their pipeline."""
    return max(_moments(Rank(segment, processes, rank, device)), key=lambda memory: memory.total)


def _moments(rank: Rank) -> Iterator[Memory]:
    for moment in (*FORWARD, "embedding", "update"):
        yield _memory_at(rank, moment)
    for backward in rank.backward_passes:
        rank.backward = backward
        for moment in PASSES:
            yield _memory_at(rank, moment)
    if rank.segment.separate_gradients > 1:
        yield _memory_at(rank, "combination")


def _memory_at(rank: Rank, moment: str) -> Memory:
    parts = {term.part: 0.0 for term in TERMS}
    for term in TERMS:
        if moment in term.moments:
            parts[term.part] += term.bytes(rank)
    return Memory(**parts, moment=moment)
