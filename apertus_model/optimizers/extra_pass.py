"""What an optimizer may want beside the gradients of a step: those of another loss of the same batch.

The trainer knows this class and no optimizer by name. Where `extra_pass_due` is true before a step, the trainer
makes the gradients of `extra_loss` over the whole batch, calls `take_extra_gradients`, and drops them.
"""

from abc import abstractmethod

import torch
from torch.optim import Optimizer

from apertus_model.model.output import Reader


class WithExtraPass(Optimizer):
    """Base of such an optimizer."""

    @property
    @abstractmethod
    def extra_pass_due(self) -> bool:
        """Whether the pass belongs before the next step: the same on all ranks."""

    @abstractmethod
    def extra_loss(self, step: int, labels: torch.Tensor, weights: torch.Tensor, places: torch.Tensor, denominator: torch.Tensor) -> Reader:
        """The part of the loss that a micro-batch is, as the output projection computes it.

        Args:
            step: counted within the stage.
            labels: (batch, local sequence) int64; IGNORED where a token counts for nothing.
            weights: of the labels, of the same shape; 1 where samples have none.
            places: of the labels in the step's whole batch.
            denominator: sum of the weights of the step; float64 scalar.
        """

    @abstractmethod
    def take_extra_gradients(self) -> None:
        """Takes the gradients as they stand: summed over the micro-batches and ranks of the step."""
