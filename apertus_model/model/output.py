"""The output layer: logits, or a loss that is computed in it, chunk by chunk.

With a vocabulary of 131,072, the logits of a batch and their gradient are larger than the rest of the model,
so no training step holds them in memory. These are the calls:

    Objective.forward                       loss_fn = partial(self.loss, batch=...)
      ApertusModel.forward                  model(tokens, ..., labels=labels, loss_fn=loss_fn)
        OutputLayer.forward                 loss_fn(LastStates(hidden, weight, labels, vocab))
          Objective.loss                    the formula of the objective (`trainer.objectives`)
            losses.cross_entropy            computes, uses and drops the logits of 1,024 tokens at a time

The loss has to be computed inside this module's forward pass, and not after it: FSDP gathers the weight for
it once, and reduces its gradient once, however many chunks there are. torchtitan's `ChunkedLossWrapper`
instead calls `lm_head`, and runs a backward pass, for each chunk; so it cannot compute a loss that needs the
log-probabilities of whole sequences, such as DPO's. A loss function may return anything: evaluation passes
`log_probabilities`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Shard
from torchtitan.models.common import Linear
from torchtitan.protocols.module import Module

from apertus_model.losses.cross_entropy import LastStates, VocabShard

REWARD_HEAD = "lm_head.score"
"""Name of the weight of a reward model's head in a checkpoint."""
LossFunction = Callable[[LastStates], Any]
"""Called with local tensors; with tensor parallelism each rank has a part of the words. It returns the same
value on all ranks that share the vocabulary. Its gradient with respect to the hidden states is that of the
rank's own words; the layer sums these gradients over the ranks."""


class OutputLayer(Linear):
    """`lm_head`: (batch, seq_len, dim) -> logits (batch, seq_len, vocab_size), or what `loss_fn` returns."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(
        self, input: torch.Tensor, labels: torch.Tensor | None = None, loss_fn: LossFunction | None = None
    ) -> Any:
        """Logits without `loss_fn`; with it, its result for `labels`."""
        if loss_fn is None:
            return super().forward(input)
        if not isinstance(self.weight, DTensor):
            return loss_fn(LastStates(input, self.weight, labels))
        mesh = self.weight.device_mesh
        assert self.weight.placements == (Shard(0),) and isinstance(input, DTensor), (
            "tensor parallelism splits the words"
        )
        words_per_rank = -(-self.weight.shape[0] // mesh.size())
        vocab = VocabShard(begin=words_per_rank * mesh.get_local_rank(), group=mesh.get_group())
        hidden = input.to_local(grad_placements=[Partial()])
        return loss_fn(LastStates(hidden, self.weight.to_local(), labels, vocab))


class RewardHead(Module):
    """`lm_head` of a reward model: (batch, seq_len, dim) -> rewards (batch, seq_len, 1), or what `loss_fn`
    returns for the head's weight, which is that of one word. Ranks that share the vocabulary in other models
    each have the whole weight."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        in_features: int

    def __init__(self, config: Config) -> None:
        super().__init__()
        # not `weight`, so that no checkpoint's output weight is mistaken for it
        self.score = nn.Parameter(torch.empty(1, config.in_features))

    def forward(
        self, input: torch.Tensor, labels: torch.Tensor | None = None, loss_fn: LossFunction | None = None
    ) -> Any:
        """See `OutputLayer.forward`."""
        weight = self.score
        if isinstance(weight, DTensor):
            assert isinstance(input, DTensor)
            weight, input = weight.to_local(), input.to_local()
        return F.linear(input, weight) if loss_fn is None else loss_fn(LastStates(input, weight, labels))
