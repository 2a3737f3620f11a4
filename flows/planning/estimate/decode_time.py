"""Estimates the seconds of sampling, token by token, from the shapes alone.

A step gives every sequence in flight one token. It reads all weights, and the keys and values of every
sequence; for layers without attention, it reads and writes the states. Its products are too small to keep a
GPU busy, so the memory bandwidth decides as long as few sequences are in flight:

    step = max(weights, products) + max(keys and values, scores) + states
           + sums over the GPUs that share the layers

with the rates of a rehearsal (`apertus_model.rehearsal.rates`).

Invariant: a pure function of shapes and rates; host time, which can be most of the time for small models
without CUDA graphs, is not included.
"""

from __future__ import annotations

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
        """The bytes that are kept for a sequence."""
        return self.keys(context) + self.states

    def room(self, context: float) -> int:
        """The number of sequences of `context` tokens whose cache and states fit beside the weights."""
        free = CACHE * self.rates.memory * self.gpus - self.width * self.model.parameters
        return max(0, int(free / self.cached(context)))

    def step(self, sequences: float, context: float) -> float:
        """The seconds of a step of `sequences` sequences, each with `context` tokens before it."""
        model, rates, gpus = self.model, self.rates, self.gpus
        matrices = model.layer_runs * model.layer_matrices + len(model.mamba_layers) * model.mamba_matrices
        products = 2 * sequences * (matrices + model.vocab_size * model.dim)
        scores = 4 * sequences * model.score_runs * model.query_dim * context
        seconds = rates.compute(products / gpus, self.weights / gpus, "matrix", self.width)
        read = self.keys(context) * model.score_runs / max(1, self.attentions)
        seconds += rates.compute(scores / gpus, sequences * read / gpus, "attention", self.width)
        seconds += rates.compute(0, sequences * 2 * self.states / gpus, "memory", self.width)
        states = self.width * sequences * model.dim
        return seconds + 2 * model.layer_runs * rates.between("all-reduce", states, gpus, 1)


def decode_seconds(
    replica: Replica, sequences: float, in_flight: int, prompt: float, tokens: float
) -> float | None:
    """The seconds in which a replica completes `sequences` prompts of `prompt` tokens by `tokens` tokens
    each, with at most `in_flight` sequences at a time; None if not even one fits the GPUs."""
    together = min(float(in_flight), sequences, replica.room(prompt + tokens))
    if together < 1:
        return None
    return sequences / together * max(0.0, tokens - 1) * replica.step(together, prompt + tokens / 2)
