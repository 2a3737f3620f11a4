"""What a step minimises: the objectives by name, each with what it reads of a sample and what its mean is taken over.

An objective's loss is a sum over a micro-batch divided by a denominator of the whole step: the sum of `count` over all micro-batches and
data-parallel ranks. So the step's loss is the sum of the losses of all micro-batches, and its gradient is the sum of their gradients.

Invariant: loss and gradient of a step depend on its samples alone, not on how they are spread over ranks and micro-batches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

from apertus_model.losses.cross_entropy import Vocabulary, cross_entropy, total_weight
from apertus_model.losses.preference import beta_log_partition, dpo, qrpo_residual, sequence_beta
from apertus_model.losses.sequences import sequence_log_probabilities
from apertus_model.model.output import Reader, log_probability_reader
from specs.stages.dpo import DpoLoss
from specs.stages.qrpo import QrpoLoss

Extras = Mapping[str, torch.Tensor]


class Term(NamedTuple):
    """The part of a step's loss that a micro-batch is on this rank.

    loss: scalar; its gradient with respect to the hidden states of this rank is theirs in the step's loss.
    copies: number of ranks that compute this same term.
    columns: name -> (sum, number of summands), float64 of shape (2,), of what is averaged over the step for the metrics.
    """

    loss: torch.Tensor
    copies: int = 1
    columns: dict[str, torch.Tensor] = {}  # noqa: RUF012  # never changed


class Objective(ABC):
    """`fields`: tensors of a sample beside input, labels and positions; `per_token`: those of them that have the length of the sequence.

    A micro-batch takes two steps: the model's output projection calls `reader(...)`, and `term` makes the loss of what it has read.
    """

    fields: ClassVar[tuple[str, ...]] = ()
    per_token: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def count(self, labels: torch.Tensor, extras: Extras) -> torch.Tensor:
        """What a micro-batch of whole rows adds to the denominator: float64 scalar."""

    @abstractmethod
    def reader(self, labels: torch.Tensor, extras: Extras, denominator: torch.Tensor) -> Reader:
        """What is read from the hidden states of a micro-batch.

        Args:
            labels: (batch, local sequence) int64.
            extras: the tensors of `fields`; those per token are (batch, local sequence).
            denominator: float64 scalar.
        """

    @abstractmethod
    def term(
        self, read: torch.Tensor, labels: torch.Tensor, extras: Extras, denominator: torch.Tensor, group: dist.ProcessGroup | None
    ) -> Term:
        """The term of a micro-batch.

        Args:
            read: what the reader has returned.
            labels, extras, denominator: as above.
            group: the ranks that share each row, None when a rank has whole rows.
        """


class CrossEntropy(Objective):
    """sum(w_i ce_i) / sum(w_i) over the labels that are kept; plain cross-entropy, with weights of 1, where samples have none."""

    def count(self, labels: torch.Tensor, extras: Extras) -> torch.Tensor:
        return total_weight(labels, extras.get("weights"))

    def reader(self, labels: torch.Tensor, extras: Extras, denominator: torch.Tensor) -> Reader:
        def read(hidden: torch.Tensor, weight: torch.Tensor, vocabulary: Vocabulary) -> torch.Tensor:
            return cross_entropy(hidden, weight, labels, denominator, extras.get("weights"), vocabulary)

        return read

    def term(
        self, read: torch.Tensor, labels: torch.Tensor, extras: Extras, denominator: torch.Tensor, group: dist.ProcessGroup | None
    ) -> Term:
        return Term(read)


class WeightedCrossEntropy(CrossEntropy):
    """Cross-entropy of samples with a weight per label."""

    fields = ("weights",)
    per_token = ("weights",)


class PreferenceObjective(Objective):
    """A loss on the log-ratios to the reference; see `apertus_model.data.preference_samples` for the fields."""

    fields = ("segments", "rewards", "reference", "present")
    per_token = ("segments",)

    def reader(self, labels: torch.Tensor, extras: Extras, denominator: torch.Tensor) -> Reader:
        return log_probability_reader(labels)

    def term(
        self, read: torch.Tensor, labels: torch.Tensor, extras: Extras, denominator: torch.Tensor, group: dist.ProcessGroup | None
    ) -> Term:
        present, reference = extras["present"], extras["reference"]
        total, lengths = sequence_log_probabilities(read, labels, extras["segments"], present.shape[1], group)
        log_ratio = torch.where(present, total - reference, 0.0)
        losses, beta, columns = self.losses(log_ratio, lengths, extras)
        copies = dist.get_world_size(group) if group is not None else 1
        with torch.no_grad():
            pairs = present[:, 0::2] & present[:, 1::2]
            implicit = beta.to(log_ratio.dtype) * log_ratio
            columns = {
                "log_ratio": _sum(log_ratio, present),
                "log_ratio_chosen": _sum(log_ratio[:, 0::2], present[:, 0::2]),
                "log_ratio_rejected": _sum(log_ratio[:, 1::2], present[:, 1::2]),
                "accuracy": _sum(implicit[:, 0::2] > implicit[:, 1::2], pairs),
                **columns,
            }
        return Term(losses.sum() / denominator.to(losses.dtype), copies, columns)

    @abstractmethod
    def losses(
        self, log_ratio: torch.Tensor, lengths: torch.Tensor, extras: Extras
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Losses, 0 where nothing is present; beta_i of each sequence; further columns."""


@dataclass(frozen=True)
class Qrpo(PreferenceObjective):
    """Mean, over all sequences, of (q - beta_i ln Z(beta_i) - beta_i r)^2; chosen and rejected ones count alike."""

    loss: QrpoLoss

    def count(self, labels: torch.Tensor, extras: Extras) -> torch.Tensor:
        return extras["present"].double().sum()

    def losses(
        self, log_ratio: torch.Tensor, lengths: torch.Tensor, extras: Extras
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        loss = self.loss
        present, quantiles = extras["present"], extras["rewards"]
        beta = sequence_beta(lengths, beta=loss.beta, length_normalised=loss.length_normalised, beta_max=loss.beta_max)
        residual = torch.where(present, qrpo_residual(log_ratio, quantiles, beta), 0.0)
        target = quantiles.double() - beta_log_partition(beta)
        return residual.square(), beta, {"target": _sum(target, present), "residual": _sum(residual.detach(), present)}


@dataclass(frozen=True)
class Dpo(PreferenceObjective):
    """Mean, over all pairs, of -ln sigmoid(beta_c r_c - beta_r r_r)."""

    loss: DpoLoss

    def count(self, labels: torch.Tensor, extras: Extras) -> torch.Tensor:
        present = extras["present"]
        return (present[:, 0::2] & present[:, 1::2]).double().sum()

    def losses(
        self, log_ratio: torch.Tensor, lengths: torch.Tensor, extras: Extras
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        present = extras["present"]
        pairs = present[:, 0::2] & present[:, 1::2]
        beta = sequence_beta(lengths, beta=self.loss.beta, length_normalised=self.loss.length_normalised)
        implicit = beta.to(log_ratio.dtype) * log_ratio
        margin = implicit[:, 0::2] - implicit[:, 1::2]
        losses = torch.where(pairs, dpo(margin, self.loss.label_smoothing), 0.0)
        return losses, beta, {"margin": _sum(margin.detach(), pairs)}


def _sum(values: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.where(where, values.double(), 0.0).sum(), where.double().sum()])


_OBJECTIVES: dict[str, Callable[[Any], Objective]] = {
    "cross-entropy": lambda segment: CrossEntropy(),
    "weighted-cross-entropy": lambda segment: WeightedCrossEntropy(),
    "qrpo": lambda segment: Qrpo(segment.loss),
    "dpo": lambda segment: Dpo(segment.loss),
}


def objective_of(segment: Any) -> Objective:
    """The objective that `segment.objective` names."""
    return _OBJECTIVES[segment.objective](segment)
