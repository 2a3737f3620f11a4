"""Estimates the memory of one GPU in a training step, by part, from the shapes alone.

FSDP shards float32 weights and optimizer states, and gathers weights for computation in the parameters'
precision, group by group: embedding, each layer, last norm with output projection. The peak of a step is the
largest of these moments:

    teacher    all activations, beside a layer of a teacher that the loss asks (`estimate.teacher`)
    loss       all activations, a chunk of logits, the gradient of the output weight
    backward   the same after the output: the last layer's backward pass works on top of the activations of
               all layers
    end        the first layer's backward pass, beside the gradients of all layers
    embedding  all gradients, that of the embedding in full
    update     all gradients and the optimizer's temporaries
    combination  the gradients of all sources and their sum, where a step has several

Invariants: a pure function of shapes and layout. With `device="cpu"` it agrees with torch's allocations for
several shapes and layouts (`tests/apertus_model/trainer/test_memory_model.py`). `device="cuda"` differs in
two operators: the fused RMSNorm keeps its input, where the CPU's keeps two float32 copies, and attention
keeps no mask. Not counted: CUDA context, workspaces of libraries and fragmentation, for which `specs.cluster`
leaves room.

Shapes: N tokens of a micro-batch on this rank, D width, Q and K widths of queries and keys, F width of the
feed-forward, V words on this rank.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from flows.planning.estimate.layer_memory import Device, LayerMemory
from flows.planning.estimate.teacher import TeacherMemory, teacher_memory
from flows.planning.estimate.trained import trained_part
from specs.capabilities import CHUNK_TOKENS, OBJECTIVES, OPTIMIZERS, WIDTHS
from specs.launch import Parallel
from specs.layer_schedule import INPUT
from specs.layout import backward_passes, micro_batch_size, micro_batches_in_flight, stage_layers
from specs.model import ModelSpec
from specs.optimizer import OptimizerSpec
from specs.stages.distill import DistillSegment
from specs.stages.sft import AdaptedSegment
from specs.stages.training import Segment
from specs.trainable import untouched

# stages of a rank whose weights torch's interleaved schedules hold gathered at a time
GATHERED_STAGES = 3


@dataclass(frozen=True)
class Memory:
    """Bytes of one GPU at the moment of the peak; with a pipeline, of the rank that needs the most."""

    weights: float  # the rank's shard, float32, and a table of positions for each of its stages
    gradients: float  # the rank's shard, float32; in a pipeline also the sums before reduction
    optimizer_states: float
    activations: float  # kept by the forward pass for the backward pass
    working: float  # added by the pass of a layer while it runs
    output: float  # logits of a chunk, gradients of the output weight and of the states
    communication: float  # gathered weights, and gradients during reduction
    update: float  # temporaries of the optimizer
    moment: str  # of the peak

    @property
    def total(self) -> float:
        return sum(value for value in asdict(self).values() if isinstance(value, float))

    def to_json(self) -> dict[str, Any]:
        """Whole bytes by part, their `total`, and the `moment`."""
        parts = {name: round(value) for name, value in asdict(self).items() if isinstance(value, float)}
        return {**parts, "total": sum(parts.values()), "moment": self.moment}


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters that one rank computes with, before FSDP."""

    layer: float  # of one layer
    matrices: float  # those of `layer` in matrices
    embedding: float
    head: float  # last norm and output projection


def parameters(model: ModelSpec, tp: int = 1) -> Parameters:
    """The parameters of a tensor-parallel rank: its part of matrices and tables, and all of the norms."""
    mixers = len(model.mamba_layers) / max(1, model.n_layers)  # a pipeline's stages are counted as equal
    matrices = (model.layer_matrices + mixers * model.mamba_matrices) / tp
    table = model.vocab_size * model.dim / tp
    head = table if model.head == "vocabulary" else float(model.dim)  # a reward head is not divided
    vectors = model.layer_vectors + mixers * model.mamba_vectors / tp
    return Parameters(matrices + vectors, matrices, table, head + model.dim)


def state_bytes(
    optimizer: OptimizerSpec, matrices: float, others: float, model: ModelSpec, layers: float
) -> float:
    """The bytes of the optimizer's states for `matrices` parameters in matrices of layers and `others`
    elsewhere (tables, norms, scalars)."""
    assert optimizer.name is not None, "the planner resolves the optimizer"
    facts = OPTIMIZERS[optimizer.name]
    inside, outside = facts.states
    bases = 0.0
    if facts.largest_side:
        queries, keys, dim, ffn = model.query_dim, model.key_dim, model.dim, model.ffn_dim
        sides = [(queries, dim), (keys, dim), (keys, dim), (dim, queries), (ffn, dim), (dim, ffn)]
        tables = [(model.vocab_size, dim)] * 2 if others else []
        mixers = layers * len(model.mamba_layers) / model.n_layers if model.n_layers else 0.0
        mixing = [(queries, dim), (model.n_heads, dim)]  # gates and step sizes; then convolutions
        mixing += [(size, model.mamba.conv_width) for size in (queries, keys, keys) if model.mamba]
        squares = [
            number * side**2
            for number, pairs in ((layers, sides), (mixers, mixing), (1, tables))
            for pair in pairs
            for side in pair
            if side <= facts.largest_side
        ]
        bases = 4 * 2 * sum(squares)
    return WIDTHS[optimizer.state_dtype or "float32"] * (inside * matrices + outside * others) + bases


def state_gradients(model: ModelSpec) -> list[int]:
    """For every step of the schedule, the number of earlier states whose gradients are held during its
    backward pass, for the sums of this and of later steps."""
    waiting: set[int] = set()
    found = []
    for number, step in reversed(list(enumerate(model.schedule, 1))):
        waiting |= {number - 1 if state == INPUT else state for state in step.summed}
        waiting.discard(number)
        found.append(len(waiting))
    return found[::-1]


def layer_runs(layer: LayerMemory, model: ModelSpec) -> list[list[LayerMemory]]:
    """The layers of every step of the schedule, with their mixer and the keys that it sees and keeps."""
    later = {number for step in model.schedule for number in step.reads}
    return [
        [
            replace(
                layer, reads=len(step.reads), read_later=number in later, mamba=index in model.mamba_layers
            )
            for index in step.layers
        ]
        for number, step in enumerate(model.schedule, 1)
    ]


def key_gradients(model: ModelSpec) -> list[int]:
    """For every step of the schedule, the number of steps up to it whose keys and values have a gradient,
    from this and later steps, that is held during its backward pass."""
    waiting: set[int] = set()
    found = []
    for number, step in reversed(list(enumerate(model.schedule, 1))):
        waiting |= set(step.reads)
        found.append(len(waiting))
        waiting.discard(number)
    return found[::-1]


def busiest_step(model: ModelSpec, runs: list[list[LayerMemory]], state: float) -> tuple[float, float]:
    """For the step whose backward pass has the most in memory: the bytes of the held gradients of states, of
    `state` bytes each, and of keys and values, less what is freed by then; and the bytes that a layer
    adds."""
    found, freed = [], 0.0
    waiting = zip(model.schedule, runs, state_gradients(model), key_gradients(model), strict=True)
    for step, layers, states, steps in reversed(list(waiting)):
        freed += bool(step.summed) * state  # its output: the backward pass of the sum comes first
        one = layers[-1]
        keys = 2 * one.tokens * one.b * model.key_dim / one.tp
        found.append((states * state + steps * keys - freed, one.backward()))
        freed += sum(layer.kept() for layer in layers)
    return max(found, key=sum)


class BackwardPass(NamedTuple):
    """Bytes of a rank's gradients and activations when a micro-batch begins its backward pass in a stage, and
    when the pass reaches the stage's first layer."""

    gradients: float
    activations: float
    gradients_at_end: float
    activations_at_end: float


def passes_of_one_round(
    parallel: Parallel, rank: int, parameters: list[float], layers: list[int], kept: float
) -> list[BackwardPass]:
    """The backward passes of a batch that fills an interleaved pipeline once: a stage of a rank then has
    gradients only after the rank's next stage has finished all its backward passes. `parameters` and `layers`
    are by stage; a layer's activations have `kept` bytes."""
    found = []
    for stage, first, waiting in backward_passes(parallel, rank):
        waits = sum(number * size for number, size in zip(waiting, layers, strict=True))
        after, before = 4.0 * sum(parameters[stage:]), 4.0 * sum(parameters[stage + first :])
        found.append(BackwardPass(before, waits * kept, after, (waits - max(0, layers[stage] - 1)) * kept))
    return found


def memory_of_step(segment: Segment, processes: int, device: Device = "cuda") -> Memory:
    """The peak memory of a GPU in a step of a segment on `processes` GPUs. The layout must fit
    (`specs.layout`)."""
    found = [memory_of_rank(segment, processes, rank, device) for rank in range(segment.parallel.pp)]
    return max(found, key=lambda memory: memory.total)


def micro_batches_of(segment: Segment, processes: int) -> tuple[int, int]:
    """The sequences of a micro-batch, and the micro-batches of a step, on each data-parallel rank."""
    parallel = segment.parallel
    share = segment.global_batch_size * parallel.tp * parallel.cp * parallel.pp // processes
    rows = micro_batch_size(parallel, share // segment.separate_gradients, segment.micro_batch_size) or 1
    return rows, share // rows


def memory_of_rank(segment: Segment, processes: int, rank: int, device: Device = "cuda") -> Memory:
    """The memory of the GPUs with index `rank` in their pipeline."""
    model, parallel = segment.model, segment.parallel
    tp, cp, pp = parallel.tp, parallel.cp, parallel.pp
    ranks = processes // (tp * cp * pp)
    shards = ranks // parallel.dp_replicate * cp  # FSDP shards over context-parallel ranks as well
    rows, micro_batches = micro_batches_of(segment, processes)
    own_layers = layers_of_rank(model.n_layers, parallel.stages, pp, rank)
    layers = sum(own_layers)
    first, last = rank == 0, rank == pp - 1
    b = WIDTHS[segment.precision.param]
    # sdpa is the only backend that sees keys of earlier steps
    masked = device == "cpu" or segment.attention == "sdpa" or any(step.reads for step in model.schedule)
    spread = tp if parallel.sequence_parallel else 1
    tokens = rows * segment.sequence_length / cp
    some = trained_part(segment, tp)
    layer = LayerMemory(
        model,
        tokens,
        rows,
        b,
        tp,
        cp,
        spread,
        device,
        masked,
        segment.activation_checkpointing,
        segment.memory_budget,
        isinstance(segment, AdaptedSegment) and segment.lora is not None,
        mamba=pp > 1 and model.mamba is not None,  # a pipeline's layers are counted as if all were Mamba-2
    )
    count = parameters(model, tp)
    embedding, head = count.embedding * first, count.head * last
    own = layers * count.layer + embedding + head
    trained_layer, trained = count.layer, own
    trained_matrices = layers * count.matrices
    if some is not None:
        trained_layer, trained_matrices, embedding, head, trained = some
        if layer.resting:  # adapters: a pipeline's rank has those of its layers
            trained = trained_matrices = layers * trained_layer
            own += trained
    states = state_bytes(
        segment.optimizer,
        trained_matrices / shards,
        (trained - trained_matrices) / shards,
        model,
        layers if some is None or layer.resting else trained_matrices / count.matrices,
    )
    piped = pp > 1  # then gradients are summed in full until the last micro-batch
    single = shards == 1 and parallel.dp_replicate == 1
    plain = processes == 1 and b == 4  # no FSDP: a layer's gradients are not in memory twice
    # on CPU, the float32 copies of a layout's single shard are not counted
    copies = 0 if plain or (single and b == 4 and device == "cpu") else 1
    stages = [number * count.layer for number in own_layers]
    stages[0] += count.embedding * first
    stages[-1] += count.head * last
    whole = b * sum(sorted(stages)[-GATHERED_STAGES:])
    gathered = 0.0 if parallel.reshards else whole if piped else copies * whole  # after a forward pass
    # after the backward pass of the layers; in a pipeline, weights then stay gathered in any case
    left = whole if piped else 0.0 if parallel.reshards else copies * b * count.embedding
    # each stage of a pipeline has a buffer for the states, and one for the gradients, of every micro-batch
    buffers = 2 * parallel.stages // pp - first - last if piped else 0
    buffered = buffers * micro_batches * tokens * b * model.dim / spread
    # cosines and sines of RoPE, which the layers of a stage share
    positions = len(own_layers) * 4.0 * segment.sequence_length * 2 * model.head_dim
    in_flight = micro_batches_in_flight(parallel, rank, micro_batches)
    reached = [own_layers[0] - untouched(model, segment.trainable), *own_layers[1:]]
    waiting = sum(number * size for number, size in zip(in_flight, reached, strict=True))
    activations, lowest = waiting * layer.kept(), max(0, reached[0] - 1) * layer.kept()
    state = tokens * b * model.dim / spread
    summed = sum(bool(step.summed) for step in model.schedule) * state  # outputs that are not passed on
    returned = 0.0
    working = ending = layer.backward()
    if not model.stock and not piped:
        runs = layer_runs(layer, model)
        reached_runs = [run.kept() for step in runs for run in step][untouched(model, segment.trainable) :]
        activations, lowest = sum(reached_runs), sum(reached_runs[1:])
        returned, working = busiest_step(model, runs, state)
    facts = OBJECTIVES[segment.objective]
    aligned = facts.mixers_alone
    if isinstance(segment, DistillSegment) and aligned:
        # only mixers run, and no layer depends on another
        mixer, by_matrix = replace(layer, mamba=True), segment.loss.compare == "matrix"
        activations, lowest = len(model.mamba_layers) * mixer.compared(by_matrix), 0.0
        working = ending = 2 * mixer.result(by_matrix)  # their difference, and its gradient
        last = False  # no output is computed
    final = in_flight[-1] * tokens * (layer.norm(model.dim / spread) + b * model.dim) * last
    ahead = 1 if single else 2  # a group is gathered while another is computed
    prefetched = copies * b * count.layer * ahead if parallel.reshards else 0.0
    last_layer = 0.0 if piped else prefetched or copies * b * count.layer
    reducing = 0 if piped or plain else 1  # whether gradients in reduction are in memory too
    words = model.vocab_size / tp if model.head == "vocabulary" else 0.0  # of logits; a reward model has none
    table = 4.0 * words * model.dim
    states_gradient = tokens * model.dim * b * last
    # The float32 sum of the output weight's gradient. Cross-entropy makes it in the forward pass, and the
    # graph of a micro-batch holds it as long as it lives; losses of log-probabilities make it in the backward
    # pass, and drop it.
    summed_table = table * last * (in_flight[-1] if parallel.pp_schedule == "gpipe" else 1)
    summed_table *= head > model.dim  # unless the norm alone is trained
    kept_table = 0.0 if facts.recomputes_logits else summed_table
    shard = 4.0 * trained / shards
    every = 4.0 * trained if piped else shard
    # if all micro-batches that a gradient sums wait at once, none has had its backward pass yet
    summed_batches = micro_batches // segment.separate_gradients
    before = every if sum(in_flight) < summed_batches * len(own_layers) else 0.0
    passes = [BackwardPass(before, activations, every, activations - lowest)]
    if piped and len(own_layers) > 1 and micro_batches == pp and some is None:
        before = 4.0 * stages[-1]  # when the second micro-batch has its loss
        passes = passes_of_one_round(parallel, rank, stages, reached, layer.kept())
    # losses of log-probabilities take the tokens of one row at a time
    chunk = min(CHUNK_TOKENS, tokens / rows if facts.recomputes_logits else tokens)
    logits = chunk * words * (4 * facts.chunk_logits + (b if b == 2 else 0)) * last
    logits += chunk * model.dim * (4 if device == "cpu" else b) * last * bool(words)  # states of the chunk
    largest = max(head, count.matrices / 2) / shards
    teacher = TeacherMemory()
    if last or aligned:
        teacher = teacher_memory(segment, tokens=tokens, b=b, shards=shards, single=single)
    base = Memory(4.0 * own / shards + positions + teacher.weights, 0.0, states, 0.0, 0.0, 0.0, 0.0, 0.0, "")
    head_copy = copies * b * count.head * last if parallel.reshards else 0.0
    moments = [
        replace(
            base, gradients=before, activations=activations + summed + final,
            output=logits + summed_table + states_gradient + teacher.states,
            communication=buffered + gathered + head_copy + teacher.head, moment="loss",
        ),
        replace(
            base, gradients=before, working=teacher.layer,
            activations=0.0 if aligned else activations + summed + final,  # it ends before mixers begin
            communication=buffered + gathered + head_copy + teacher.layers, moment="teacher",
        ),
        replace(
            base, gradients=every, output=kept_table + states_gradient,
            communication=buffered + left + reducing * 4.0 * embedding * (1 if single else 2),
            moment="embedding",
        ),
        replace(
            base, gradients=shard, communication=buffered + (left if piped else 0.0),
            update=_update(segment.optimizer, trained / shards, largest, device), moment="update",
        ),
    ]  # fmt: skip
    not_yet = 4.0 * (embedding + plain * trained_layer) / shards  # gradients missing in a first layer's pass
    for begun in passes:
        moments += [
            replace(
                base, gradients=max(begun.gradients, 4.0 * head / (1 if piped else shards)),
                activations=begun.activations + summed + returned,
                working=working,
                output=kept_table + states_gradient,
                communication=buffered + gathered + prefetched + reducing * 4.0 * head,
                moment="backward",
            ),
            replace(
                base,
                gradients=max(begun.gradients, begun.gradients_at_end - not_yet),
                activations=begun.activations_at_end,
                working=ending, output=kept_table + states_gradient,
                communication=buffered + left + last_layer + reducing * 4.0 * trained_layer, moment="end",
            ),
        ]  # fmt: skip
    if (held := (segment.separate_gradients - 1) * shard) > 0:
        # gradients of the other sources wait for those of the last source, and all of them for their sum
        moments = [replace(one, gradients=one.gradients + held * (one.moment != "update")) for one in moments]
        sums = replace(base, gradients=held + 2 * shard, update=2 * 4.0 * largest, moment="combination")
        moments.append(sums)
    return max(moments, key=lambda memory: memory.total)


def layers_of_rank(n_layers: int, stages: int, pp: int, rank: int) -> list[int]:
    """The layer counts of a pipeline rank's stages: process r has stages r, r + pp, r + 2 pp, ..."""
    return stage_layers(n_layers, stages)[rank::pp]


def _update(optimizer: OptimizerSpec, trained: float, largest: float, device: Device) -> float:
    """The bytes of the update's temporaries. AdEMAMix: none on a GPU, where the update is one kernel;
    elsewhere the roots of the second moment and the numerators of a chunk, float32 copies of bfloat16
    moments, and bits to round the largest tensor. Other optimizers: one tensor like the parameters."""
    assert optimizer.name is not None, "the planner resolves the optimizer"
    facts = OPTIMIZERS[optimizer.name]
    if facts.kernel and device == "cuda":
        return 0.0
    if facts.chunk is None:
        return 4.0 * trained
    rounded = optimizer.state_dtype == "bfloat16"
    return 4.0 * min(trained, max(facts.chunk, largest)) * (5 if rounded else 2) + (
        3 * 4.0 * largest if rounded else 0
    )
