"""The base of the objectives that a step minimises.

The loss of a micro-batch is a sum divided by a denominator of the whole step (or several sums, each divided
by its own): the sum of `Objective.count` over all micro-batches and data-parallel ranks. So the loss of the
step is the sum of the losses of its micro-batches, and its gradient the sum of their gradients.

Invariant: loss and gradient of a step depend on its samples alone, not on how they are spread over ranks and
micro-batches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import register_pytree_node

from apertus_model.losses.cross_entropy import LastStates
from apertus_model.trainer.evaluator import Evaluator, HeldOutLoss
from specs.model import ModelSpec

Extras = Mapping[str, Tensor]
LoadModel = Callable[[str, ModelSpec], torch.nn.Module]
"""load(role, spec): the frozen model of the checkpoint that is the input `role` of the segment, in the layout
and the precision of training."""


class MicroBatch(NamedTuple):
    """The inputs of a micro-batch's loss besides its labels."""

    extras: Extras  # the tensors that `Objective.fields` names; those in `per_token`: (batch, local sequence)
    denominator: Tensor  # of the whole step: the sum of all `Objective.count`
    group: dist.ProcessGroup | None = None  # the ranks that share each row; None: a rank has whole rows
    # what the model was called with, for another model of the same layout
    tokens: Tensor | None = None
    arguments: Mapping[str, Any] = {}  # never changed


@dataclass(frozen=True, eq=False)
class PipelinedLoss:
    """The loss of whole rows, as the argument `loss_fn` of the last stage of a pipeline, which cuts it into
    micro-batches with the tensors in it."""

    objective: Objective
    batch: MicroBatch

    def __call__(self, states: LastStates) -> Tensor:
        return self.objective.loss(states, self.batch).loss


def _tensors(loss: PipelinedLoss) -> tuple[list[Any], tuple[Any, ...]]:
    batch = loss.batch
    return [batch.extras, batch.tokens, batch.arguments], (loss.objective, batch.denominator, batch.group)


def _with_tensors(tensors: Any, rest: Any) -> PipelinedLoss:
    (extras, tokens, arguments), (objective, denominator, group) = tensors, rest
    return PipelinedLoss(objective, MicroBatch(extras, denominator, group, tokens, arguments))


register_pytree_node(PipelinedLoss, _tensors, _with_tensors)


class MicroBatchLoss(NamedTuple):
    """The contribution of a micro-batch to the step, on this rank."""

    # The micro-batch's part of the step's loss. With respect to this rank's hidden states, it has the same
    # gradient as the step's loss.
    loss: Tensor
    # Number of ranks that compute this same part.
    copies: int = 1
    # Metrics to average over the step: name -> (sum, number of summands), float64 of shape (2,).
    columns: Mapping[str, Tensor] = {}  # never changed


class Objective(ABC):
    """The loss of a kind of training, and the tensors of a sample that it needs."""

    fields: ClassVar[tuple[str, ...]] = ()  # tensors of a sample besides input, labels and positions
    per_token: ClassVar[tuple[str, ...]] = ()  # the fields that have a value per token

    def begin(self, load: LoadModel) -> None:
        """Loads the models that the loss consults. Called once before the first step, on the ranks that
        compute the loss. Collective."""
        return

    @abstractmethod
    def count(self, labels: Tensor, extras: Extras) -> Tensor:
        """The contribution of a micro-batch of whole rows to the denominator: float64, a scalar or one number
        per sum of the loss."""

    def forward(
        self, model: torch.nn.Module, tokens: Tensor, labels: Any, batch: MicroBatch
    ) -> MicroBatchLoss:
        """Runs the forward pass of a micro-batch, with its loss, if layers are not split into a pipeline."""
        loss_fn = partial(self.loss, batch=batch)
        return model(tokens, **batch.arguments, labels=labels, loss_fn=loss_fn)

    @abstractmethod
    def loss(self, states: LastStates, batch: MicroBatch) -> MicroBatchLoss:
        """The loss of a micro-batch. The output layer calls it, with a `batch` that the trainer has bound."""

    def results(self) -> dict[str, Any]:
        """The objective's own results by the end of training, as further metrics of the artifact."""
        return {}

    def heldout_loss(self, evaluator: Evaluator, samples: Sequence[Any]) -> HeldOutLoss:
        """The loss on held-out samples, which are the same on every rank: cross-entropy per label unless an
        objective has its own. Collective."""
        return evaluator.loss(samples)


def column(values: Tensor, where: Tensor) -> Tensor:
    """The values where a condition holds, as a column of `MicroBatchLoss`."""
    return torch.stack([torch.where(where, values.double(), 0.0).sum(), where.double().sum()])
