"""Estimates the seconds of sampling, token by token, from the shapes alone.

A step gives every sequence in flight one token, and takes the sum of `TERMS`. Its products are too small to
keep a GPU busy, so the memory bandwidth decides as long as few sequences are in flight. Rates are those of a
rehearsal (`apertus_model.rehearsal.rates`).

Invariant: a pure function of shapes and rates; host time, which can be most of the time for small models
without CUDA graphs, is not included.
"""

from dataclasses import dataclass

from apertus_model.rehearsal.rates import Rates
from specs.model import ModelSpec

CACHE = 0.9  # share of a GPU's memory that weights and cache may fill: vLLM's `gpu_memory_utilization`


@dataclass(frozen=True)
class Replica:
    """A model on GPUs of one node that share every layer. `width`: bytes of a weight, key or value."""

    model: ModelSpec
    gpus: int
    width: int
    rates: Rates

    @property
    def weights(self) -> float:
        """The bytes of the weights that a step reads: all but the input embedding, with those of a layer
        counted as often as it runs."""
        model = self.model
        again = (model.layer_runs - model.n_layers) * (model.layer_matrices + model.layer_vectors)
        return self.width * (model.parameters + again - model.vocab_size * model.dim)

    def keys(self, context: float) -> float:
        """The bytes of the keys and values of a sequence, which a layer has once for each of its runs."""
        return self.width * 2 * self.attentions * self.model.key_dim * context

    @property
    def attentions(self) -> int:
        """The number of runs of layers with attention."""
        return self.model.layer_runs - len(self.model.mamba_layers)

    @property
    def states(self) -> float:
        """The bytes of a sequence's states, in float32, and of the past tokens that convolutions read."""
        state, window = self.model.mamba_state
        return len(self.model.mamba_layers) * (4 * state + self.width * window)

    def cached(self, context: float) -> float:
        return self.keys(context) + self.states

    def room(self, context: float) -> int:
        """The number of sequences of `context` tokens whose cache and states fit beside the weights."""
        free = CACHE * self.rates.memory * self.gpus - self.width * self.model.parameters
        return max(0, int(free / self.cached(context)))

    def step(self, sequences: float, context: float) -> float:
        """The seconds of a step of `sequences` sequences, each with `context` tokens before it."""
        return sum(seconds(self, sequences, context) for seconds in TERMS.values())

    def compute(self, operations: float, moved: float, kind: str) -> float:
        """The seconds of operators of all GPUs: of computing, or of moving bytes if that takes longer."""
        return self.rates.compute(operations / self.gpus, moved / self.gpus, kind, self.width)


def products(replica: Replica, sequences: float, context: float) -> float:
    """Products with the matrices, or the reads of their weights."""
    model = replica.model
    matrices = model.layer_runs * model.layer_matrices + len(model.mamba_layers) * model.mamba_matrices
    operations = 2 * sequences * (matrices + model.vocab_size * model.dim)
    return replica.compute(operations, replica.weights, "matrix")


def scores(replica: Replica, sequences: float, context: float) -> float:
    """Scores, or the reads of all keys and values, which a step of a schedule may read for earlier ones."""
    model = replica.model
    operations = 4 * sequences * model.score_runs * model.query_dim * context
    keys = replica.keys(context) * model.score_runs / max(1, replica.attentions)
    return replica.compute(operations, sequences * keys, "attention")


def states(replica: Replica, sequences: float, context: float) -> float:
    """Reads and writes of the states of layers without attention."""
    return replica.compute(0, sequences * 2 * replica.states, "memory")


def sums(replica: Replica, sequences: float, context: float) -> float:
    """Sums of a layer's two results over the GPUs that share it."""
    size = replica.width * sequences * replica.model.dim
    return 2 * replica.model.layer_runs * replica.rates.between("all-reduce", size, replica.gpus, 1)


TERMS = {"products": products, "scores": scores, "states": states, "sums": sums}
"""The time of a step, term by term."""


def decode_seconds(
    replica: Replica, sequences: float, in_flight: int, prompt: float, tokens: float
) -> float | None:
    """The seconds in which a replica completes `sequences` prompts of `prompt` tokens by `tokens` tokens
    each, with at most `in_flight` sequences at a time; None if not even one fits the GPUs."""
    together = min(float(in_flight), sequences, replica.room(prompt + tokens))
    if together < 1:
        return None
    return sequences / together * max(0.0, tokens - 1) * replica.step(together, prompt + tokens / 2)
