"""The output projection: from hidden states to logits, or to what is read from them without ever having them all.

Invariant: whatever is read, it is read inside of the module's forward pass, so that FSDP gathers the weight once and reduces its gradient
once, however often the reader uses it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Partial, Shard
from torchtitan.models.common import Linear

from apertus_model.losses.cross_entropy import WHOLE, Vocabulary, log_probabilities

Reader = Callable[[torch.Tensor, torch.Tensor, Vocabulary], torch.Tensor]
"""(hidden states (batch, seq_len, dim), own rows of the weight (words, dim), which words those are) -> a plain tensor, the same on every
rank of a tensor-parallel group. Called with local tensors; the gradient that it gives the states is that of the own words."""


class OutputProjection(Linear):
    """`lm_head`: (batch, seq_len, dim) -> logits (batch, seq_len, vocab_size), or whatever `read` makes of states and weight."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, input: torch.Tensor, *, read: Reader | None = None) -> torch.Tensor:
        """Logits without `read`; its result with it."""
        if read is None:
            return super().forward(input)
        if not isinstance(self.weight, DTensor):
            return read(input, self.weight, WHOLE)
        mesh = self.weight.device_mesh
        assert self.weight.placements == (Shard(0),) and isinstance(input, DTensor), "the words are divided among the ranks of one mesh"
        words_per_rank = -(-self.weight.shape[0] // mesh.size())
        vocabulary = Vocabulary(begin=words_per_rank * mesh.get_local_rank(), group=mesh.get_group())
        return read(input.to_local(grad_placements=[Partial()]), self.weight.to_local(), vocabulary)


def log_probability_reader(labels: torch.Tensor) -> Reader:
    """Reads ln p(label) at every place, 0 without a label: (batch, seq_len), float32. `labels`: (batch, seq_len) int64."""
    return lambda hidden, weight, vocabulary: log_probabilities(hidden, weight, labels, vocabulary)
