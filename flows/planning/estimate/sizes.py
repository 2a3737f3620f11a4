"""The sizes of what a rank of a layout computes with: parameters, those that are trained, the states of their
optimizer, and a micro-batch. Memory, time and storage of training follow from them.

Invariant: a pure function of shapes and layout.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from specs.capabilities import OBJECTIVES, OPTIMIZERS, WIDTHS
from specs.layout import micro_batch_size, stage_layers
from specs.model import ModelSpec
from specs.optimizer import OptimizerSpec
from specs.stages.training import Segment
from specs.trainable import MATRICES, trained


class Parameters(NamedTuple):
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


class Trained(NamedTuple):
    """Numbers of parameters with gradients that one tensor-parallel rank computes with, before FSDP."""

    layer: float  # of the layer that has the most
    matrices: float  # of all layers, in matrices
    embedding: float
    head: float  # last norm and output projection
    total: float


def trained_part(segment: Segment, tp: int = 1) -> Trained | None:
    """The trained parameters of a segment: those of adapters, or those that `trainable` names; None if every
    parameter of the model is trained."""
    model = segment.model
    if (lora := segment.adapters) is not None:
        layer = adapters(model, lora.rank, lora.targets) / tp
        return Trained(layer, model.n_layers * layer, 0.0, 0.0, model.n_layers * layer)
    if not segment.trainable:
        return None
    sizes = {
        name: size / (tp if _divided(name) else 1) for name, size in trained(model, segment.trainable).items()
    }

    def of(*beginnings: str) -> float:
        return sum(size for name, size in sizes.items() if name.startswith(beginnings))

    return Trained(
        layer=max(of(f"layers.{index}.") for index in range(model.n_layers)),
        matrices=sum(size for name, size in sizes.items() if any(part in name for part in MATRICES)),
        embedding=of("tok_embeddings."),
        head=of("norm.", "lm_head."),
        total=of(""),
    )


def _divided(name: str) -> bool:
    """Whether a parameter is divided among tensor-parallel ranks."""
    tables = ("tok_embeddings.weight", "lm_head.weight")
    return name in tables or any(part in name for part in MATRICES)


def adapters(model: ModelSpec, rank: int, targets: Sequence[str]) -> int:
    """The number of trained parameters of the adapters of a layer."""
    return rank * sum(sum(model.sides[target]) for target in targets)


def state_bytes(
    optimizer: OptimizerSpec, matrices: float, others: float, model: ModelSpec, layers: float
) -> float:
    """The bytes of the optimizer's states for `matrices` parameters in matrices of layers and `others`
    elsewhere (tables, norms, scalars)."""
    assert optimizer.name is not None, "the planner resolves the optimizer"
    facts = OPTIMIZERS[optimizer.name]
    inside, outside = facts.states
    squares = 0.0
    if facts.largest_side:
        tables = [(model.vocab_size, model.dim)] * 2 if others else []
        mixers = layers * len(model.mamba_layers) / model.n_layers if model.n_layers else 0.0
        squares = sum(
            number * side**2
            for number, pairs in ((layers, model.sides.values()), (mixers, model.mamba_sides), (1, tables))
            for pair in pairs
            for side in pair
            if side <= facts.largest_side
        )
    tensors = inside * matrices + outside * others
    return WIDTHS[optimizer.state_dtype or "float32"] * tensors + 4 * 2 * squares


def layers_of_rank(n_layers: int, stages: int, pp: int, rank: int) -> list[int]:
    """The layer counts of a pipeline rank's stages: process r has stages r, r + pp, r + 2 pp, ..."""
    return stage_layers(n_layers, stages)[rank::pp]


def micro_batches_of(segment: Segment, processes: int) -> tuple[int, int]:
    """The sequences of a micro-batch, and the micro-batches of a step, on each data-parallel rank."""
    parallel = segment.parallel
    share = segment.global_batch_size * parallel.tp * parallel.cp * parallel.pp // processes
    rows = micro_batch_size(parallel, share // segment.separate_gradients, segment.micro_batch_size) or 1
    return rows, share // rows


class RankSizes:
    """The sizes of a rank of a pipeline in a segment on a number of processes, which the layout must fit
    (`specs.layout`)."""

    def __init__(self, segment: Segment, processes: int, rank: int) -> None:
        self.segment, self.processes, self.rank = segment, processes, rank
        self.model, self.parallel = segment.model, segment.parallel
        self.objective = OBJECTIVES[segment.objective]
        self.tp, self.cp, self.pp = self.parallel.tp, self.parallel.cp, self.parallel.pp
        self.rows, self.micro_batches = micro_batches_of(segment, processes)  # sequences; number of a step
        self.tokens = self.rows * segment.sequence_length / self.cp  # of a micro-batch
        self.b = WIDTHS[segment.precision.param]  # bytes of an element
        # ranks that share the residual stream and the norms: tp with sequence parallelism
        self.spread = self.tp if self.parallel.sequence_parallel else 1
        copies = self.parallel.dp_replicate
        # ranks among which FSDP divides the weights: context-parallel ones as well
        self.shards = processes // (self.tp * self.cp * self.pp) // copies * self.cp
        self.single = self.shards == 1 and copies == 1  # nothing is gathered
        self.count = parameters(self.model, self.tp)
        self.piped = self.pp > 1
        self.first, self.last = rank == 0, rank == self.pp - 1
        self.stage_layers = layers_of_rank(self.model.n_layers, self.parallel.stages, self.pp, rank)
        self.layers = sum(self.stage_layers)
        # logits of a token on this rank; a reward model has none
        self.words = self.model.vocab_size / self.tp if self.model.head == "vocabulary" else 0.0

    @cached_property
    def trained(self) -> Trained:
        """The parameters of the rank that have gradients, before FSDP."""
        count, layers = self.count, self.layers
        chosen = trained_part(self.segment, self.tp)
        if chosen is None:
            embedding, head = count.embedding * self.first, count.head * self.last
            total = layers * count.layer + embedding + head
            return Trained(count.layer, layers * count.matrices, embedding, head, total)
        if self.segment.adapters is not None:
            return chosen._replace(matrices=layers * chosen.layer, total=layers * chosen.layer)
        return chosen

    def positions(self, model: ModelSpec) -> float:
        """Bytes of the cosines and sines of RoPE, in float32, of a model that reads the same rows."""
        return 4.0 * self.segment.sequence_length * 2 * model.head_dim
