"""The pass over a step's batch that an optimizer may want beside the step's own (`optimizers.extra_pass`), as an objective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from apertus_model.model.output import Reader
from apertus_model.optimizers.extra_pass import WithExtraPass
from apertus_model.trainer.objectives import CrossEntropy, Extras


class ExtraPass(CrossEntropy):
    """The loss that the optimizer asks for. The denominator is that of the step's own objective."""

    fields = ("weights", "places")
    per_token = ("weights", "places")

    def __init__(self, optimizer: WithExtraPass, step: int) -> None:
        self._optimizer, self._step = optimizer, step

    def reader(self, labels: torch.Tensor, extras: Extras, denominator: torch.Tensor) -> Reader:
        return self._optimizer.extra_loss(self._step, labels, extras["weights"], extras["places"], denominator)


def with_places(inputs: Mapping[str, torch.Tensor], labels: torch.Tensor, rows: Sequence[int]) -> dict[str, torch.Tensor]:
    """The inputs of a micro-batch with what `ExtraPass` reads of them: weights, 1 where samples have none, and places.

    Args:
        inputs: name -> tensor; not changed.
        labels: (batch, sequence), whole rows.
        rows: which row of the step's batch each of them is.
    """
    length = labels.shape[1]
    places = torch.tensor(rows)[:, None] * length + torch.arange(length)
    return {"weights": torch.ones(labels.shape), **inputs, "places": places}
