"""Optimizers that need, besides the gradients of a step, those of another loss on the same batch.

The trainer knows this class and no optimizer by name. If `extra_pass_due` is true before a step, the trainer
computes the gradients of `extra_loss` over the whole batch, calls `take_extra_gradients`, and drops them.
"""

from abc import abstractmethod

import torch
from torch.optim import Optimizer

from apertus_model.losses.cross_entropy import VocabShard


class WithExtraPass(Optimizer):
    """The base class of an optimizer that needs an extra pass."""

    @property
    @abstractmethod
    def extra_pass_due(self) -> bool:
        """Whether the extra pass must run before the next step; the same on all ranks."""

    @abstractmethod
    def extra_loss(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        vocab: VocabShard,
        *,
        step: int,
        weights: torch.Tensor,
        places: torch.Tensor,
        denominator: torch.Tensor,
    ) -> torch.Tensor:
        """A micro-batch's part of the loss, computed inside the output layer (`apertus_model.model.output`).

        Args:
            hidden: (batch, local sequence, dim), the last hidden states.
            weight: (words, dim), this rank's rows of the output weight.
            labels: (batch, local sequence) int64; IGNORE_INDEX for tokens that do not count.
            vocab: the words that the rows stand for.
            step: number of the step, counted within the stage.
            weights: of the labels, of the same shape; 1 if samples have no weights.
            places: of the labels in the step's whole batch.
            denominator: sum of the weights of the step; float64 scalar.
        """

    @abstractmethod
    def take_extra_gradients(self) -> None:
        """Reads the gradients of the parameters: sums over the micro-batches and ranks of the step."""
