"""Cross-entropy: plain, weighted, normalised, of an extra pass; and inverse reinforcement learning."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from apertus_model.losses.cross_entropy import LastStates, cross_entropy, label_scores, total_weight
from apertus_model.optimizers.hook import ExtraLoss
from apertus_model.trainer.objectives.base import Extras, MicroBatch, MicroBatchLoss, Objective
from specs.stages.sft import InverseRl as InverseRlSpec


class CrossEntropy(Objective):
    """sum(w_i (ce_i + z_loss (ln Z_i)^2)) / sum(w_i) over the labels that are kept. Without weights in the
    samples every w_i is 1, which gives plain cross-entropy if there is no `z_loss`."""

    def __init__(self, z_loss: float = 0.0) -> None:
        self._z_loss = z_loss

    def count(self, labels: Tensor, extras: Extras) -> Tensor:
        return total_weight(labels, extras.get("weights"))

    def loss(self, states: LastStates, batch: MicroBatch) -> MicroBatchLoss:
        weights = batch.extras.get("weights")
        return MicroBatchLoss(cross_entropy(states, batch.denominator, weights, self._z_loss))


class WeightedCrossEntropy(CrossEntropy):
    """Cross-entropy of samples with a weight per label."""

    fields = ("weights",)
    per_token = ("weights",)


class NormalisedCrossEntropy(Objective):
    """sum_k (sum_i w_ik ce_i) / N_k over the labels i, where N_k is the sum of the samples' counts:
    `apertus_model.data.conversations.samples` states both."""

    fields = ("weights", "counts")
    per_token = ("weights",)

    def count(self, labels: Tensor, extras: Extras) -> Tensor:
        return extras["counts"].sum(0)

    def loss(self, states: LastStates, batch: MicroBatch) -> MicroBatchLoss:
        return MicroBatchLoss(cross_entropy(states, 1.0, self._weights(batch)))

    @staticmethod
    def _weights(batch: MicroBatch) -> Tensor:
        """sum_k w_ik / N_k: (batch, local sequence), float64. A column k with N_k = 0 has weight 0."""
        weights, counts = batch.extras["weights"], batch.denominator
        return torch.where(counts > 0, weights / counts, 0.0).sum(-1)


@dataclass(frozen=True)
class InverseRl(NormalisedCrossEntropy):
    """The sums of `NormalisedCrossEntropy`, of ce_i + weight (q_i - discount V_i')^2
    (`specs.stages.sft.InverseRl`). Every place of a conversation but its last has a label, of weight 0 where
    it is not trained, so that its V is known."""

    settings: InverseRlSpec

    def loss(self, states: LastStates, batch: MicroBatch) -> MicroBatchLoss:
        log_p, value = label_scores(states)
        following = torch.nn.functional.pad(value[:, 1:], (0, 1))
        difference = log_p + value - self.settings.discount * following
        losses = self.settings.weight * difference.square() - log_p
        return MicroBatchLoss((self._weights(batch) * losses).sum().to(losses.dtype))


class ExtraPass(CrossEntropy):
    """The loss of the extra pass over a step's batch that an optimizer asks for (`optimizers.hook`).
    Its denominator is that of the step's own objective."""

    fields = ("weights", "places")
    per_token = ("weights", "places")

    def __init__(self, loss: ExtraLoss) -> None:
        super().__init__()
        self._extra_loss = loss

    def loss(self, states: LastStates, batch: MicroBatch) -> MicroBatchLoss:
        fields = {name: batch.extras[name] for name in self.fields}
        return MicroBatchLoss(self._extra_loss(states, **fields, denominator=batch.denominator))


def with_places(inputs: Extras, labels: Tensor, rows: Sequence[int]) -> dict[str, Tensor]:
    """The inputs of a micro-batch of whole rows, with the fields of `ExtraPass`: weights, 1 if samples have
    none, and places. `rows`: index of each row in the step's batch."""
    length = labels.shape[1]
    places = torch.tensor(rows)[:, None] * length + torch.arange(length)
    return {"weights": torch.ones(labels.shape), **inputs, "places": places}


OBJECTIVES: dict[str, Callable[[Any], Objective]] = {
    "cross-entropy": lambda segment: CrossEntropy(segment.z_loss),
    "weighted-cross-entropy": lambda segment: WeightedCrossEntropy(),
    "normalised-cross-entropy": lambda segment: NormalisedCrossEntropy(),
    "inverse-rl": lambda segment: InverseRl(segment.inverse_rl),
}
