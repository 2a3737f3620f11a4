"""The hook by which the trainer knows an optimizer that needs more than the gradients of a step.

Every method of `Hooked` has a default that does nothing, so that an optimizer states only what it needs.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch.optim import Optimizer

ExtraLoss = Callable[..., torch.Tensor]
"""A micro-batch's part of a loss, computed inside the output layer (`apertus_model.model.output`).

Args:
    states: `losses.cross_entropy.LastStates` of this rank's part of the rows.
    weights: of the labels, of the same shape; 1 if samples have no weights. Keyword.
    places: of the labels in the step's whole batch. Keyword.
    denominator: sum of the weights of the step; float64 scalar. Keyword.
"""


class Hooked(Optimizer):
    """The base class of an optimizer with a hook."""

    def begin(self) -> None:
        """Sets the state to what it is before the first step; the caller sets its tensors to 0."""

    def before_step(self, step: int, extra_pass: Callable[[ExtraLoss], None]) -> None:
        """Called on all ranks before the gradients of a step are computed. `extra_pass` sets the gradients of
        the parameters to those of a loss over the whole batch of the step: sums over its micro-batches and
        ranks. They are dropped afterwards. Collective."""

    def further_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors that a checkpoint holds for a parameter besides those in `state`."""
        return {}

    def load_further_state(self, parameter: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes the tensors of `further_state`. Called after those in `state` are loaded."""

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within this context, the parameters are the result of training."""
        yield
