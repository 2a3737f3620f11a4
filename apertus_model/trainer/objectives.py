"""The objectives that a step minimises: cross-entropy, weighted or normalised; inverse reinforcement
learning; QRPO; DPO; Bradley-Terry.

The loss of a micro-batch is a sum divided by a denominator of the whole step (or several sums, each divided
by its own): the sum of `Objective.count` over all micro-batches and data-parallel ranks. So the loss of the
step is the sum of the losses of its micro-batches, and its gradient the sum of their gradients.
`Objective.loss` runs inside the model's output layer; `apertus_model.model.output` says why, and shows the
calls.

Invariant: loss and gradient of a step depend on its samples alone, not on how they are spread over ranks and
micro-batches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import register_pytree_node

from apertus_model.losses.cross_entropy import (
    VocabShard,
    cross_entropy,
    label_scores,
    log_probabilities,
    total_weight,
)
from apertus_model.losses.preference import (
    beta_log_partition,
    bradley_terry,
    dpo,
    qrpo_residual,
    sequence_beta,
)
from apertus_model.losses.sequences import (
    sequence_log_probabilities,
    sequence_sums,
    shared_sum,
    token_rewards,
)
from apertus_model.model.on_host import copy_to
from apertus_model.optimizers.hook import ExtraLoss
from apertus_model.trainer.evaluator import Evaluator, HeldOutLoss
from specs.model import ModelSpec
from specs.stages.dpo import DpoLoss
from specs.stages.qrpo import QrpoLoss
from specs.stages.reward_model import RewardLoss
from specs.stages.sft import InverseRl as InverseRlSpec

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

    def __call__(self, hidden: Tensor, weight: Tensor, labels: Tensor, vocab: VocabShard) -> Tensor:
        return self.objective.loss(hidden, weight, labels, vocab, self.batch).loss


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
        found: MicroBatchLoss = model(tokens, **batch.arguments, labels=labels, loss_fn=loss_fn)
        return found

    @abstractmethod
    def loss(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, vocab: VocabShard, batch: MicroBatch
    ) -> MicroBatchLoss:
        """The loss of a micro-batch. The output layer calls it, with a `batch` that the trainer has bound.

        Args:
            hidden: (batch, local sequence, dim), the last hidden states.
            weight: (words, dim), this rank's rows of the output weight.
            labels: (batch, local sequence) int64, on the host or on the device of the states.
            vocab: the words that these rows stand for.
            batch: the other inputs of the loss.
        """

    def results(self) -> dict[str, Any]:
        """The objective's own results by the end of training, as further metrics of the artifact."""
        return {}

    def heldout_loss(self, evaluator: Evaluator, samples: Sequence[Any]) -> HeldOutLoss:
        """The loss on held-out samples, which are the same on every rank: cross-entropy per label unless an
        objective has its own. Collective."""
        return evaluator.loss(samples)


class SeparateGradients(Objective):
    """An objective that combines several gradients into that of a step. The batch consists of `parts`
    consecutive parts with equally many rows, each with a gradient of its own."""

    parts: int

    @abstractmethod
    def take(self, parameters: Sequence[Tensor]) -> None:
        """Takes the gradients away. Called after the backward passes of each part."""

    @abstractmethod
    def combine(self, parameters: Sequence[Tensor], step: int) -> dict[str, Tensor]:
        """Sets the gradients of the step. Called after the backward passes of its last part. Returns metrics,
        as `MicroBatchLoss.columns`, the same on all ranks. Collective."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """The state that `combine` depends on besides gradients, as JSON values for the facts of a
        checkpoint."""

    @abstractmethod
    def resume(self, state: Mapping[str, Any]) -> None:
        """Continues from the facts of a checkpoint."""


class CrossEntropy(Objective):
    """sum(w_i (ce_i + z_loss (ln Z_i)^2)) / sum(w_i) over the labels that are kept. Without weights in the
    samples every w_i is 1, which gives plain cross-entropy if there is no `z_loss`."""

    def __init__(self, z_loss: float = 0.0) -> None:
        self._z_loss = z_loss

    def count(self, labels: Tensor, extras: Extras) -> Tensor:
        return total_weight(labels, extras.get("weights"))

    def loss(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, vocab: VocabShard, batch: MicroBatch
    ) -> MicroBatchLoss:
        weights = batch.extras.get("weights")
        return MicroBatchLoss(
            cross_entropy(hidden, weight, labels, batch.denominator, weights, vocab, self._z_loss)
        )


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

    def loss(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, vocab: VocabShard, batch: MicroBatch
    ) -> MicroBatchLoss:
        return MicroBatchLoss(cross_entropy(hidden, weight, labels, 1.0, self._weights(batch), vocab))

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

    def loss(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, vocab: VocabShard, batch: MicroBatch
    ) -> MicroBatchLoss:
        log_p, value = label_scores(hidden, weight, labels, vocab)
        following = torch.nn.functional.pad(value[:, 1:], (0, 1))
        difference = log_p + value - self.settings.discount * following
        losses = self.settings.weight * difference.square() - log_p
        return MicroBatchLoss((self._weights(batch) * losses).sum().to(losses.dtype))


class PreferenceObjective(Objective):
    """A loss on the log-ratios to the reference; see `apertus_model.data.preferences.samples` for the
    fields."""

    fields = ("segments", "rewards", "reference", "present")
    per_token = ("segments",)

    def loss(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, vocab: VocabShard, batch: MicroBatch
    ) -> MicroBatchLoss:
        extras, group = batch.extras, batch.group
        present, reference = extras["present"], extras["reference"]
        token_log_probabilities = log_probabilities(hidden, weight, labels, vocab)
        total, lengths = sequence_log_probabilities(
            token_log_probabilities,
            copy_to(labels, hidden.device),
            extras["segments"],
            present.shape[1],
            group,
        )
        log_ratio = torch.where(present, total - reference, 0.0)
        losses, beta, columns = self.losses(log_ratio, lengths, extras)
        copies = dist.get_world_size(group) if group is not None else 1
        with torch.no_grad():
            pairs = present[:, 0::2] & present[:, 1::2]
            implicit = beta.to(log_ratio.dtype) * log_ratio
            columns = {
                "log_ratio": _sum(log_ratio, present),
                "log_ratio_chosen": _sum(log_ratio[:, 0::2], pairs),
                "log_ratio_rejected": _sum(log_ratio[:, 1::2], pairs),
                "accuracy": _sum(implicit[:, 0::2] > implicit[:, 1::2], pairs),
                **columns,
            }
        return MicroBatchLoss(losses.sum() / batch.denominator.to(losses.dtype), copies, columns)

    @abstractmethod
    def losses(
        self, log_ratio: Tensor, lengths: Tensor, extras: Extras
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The losses, 0 where no sequence is present; beta_i of each sequence; further columns."""


@dataclass(frozen=True)
class Qrpo(PreferenceObjective):
    """Mean, over all sequences, of (q - beta_i ln Z(beta_i) - beta_i r)^2; chosen and rejected ones count
    alike."""

    settings: QrpoLoss

    def count(self, labels: Tensor, extras: Extras) -> Tensor:
        return extras["present"].double().sum()

    def losses(
        self, log_ratio: Tensor, lengths: Tensor, extras: Extras
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        settings = self.settings
        present, quantiles = extras["present"], extras["rewards"]
        beta = sequence_beta(
            lengths,
            beta=settings.beta,
            length_normalised=settings.length_normalised,
            beta_max=settings.beta_max,
        )
        residual = torch.where(present, qrpo_residual(log_ratio, quantiles, beta), 0.0)
        target = quantiles.double() - beta_log_partition(beta)
        return (
            residual.square(),
            beta,
            {"target": _sum(target, present), "residual": _sum(residual.detach(), present)},
        )


@dataclass(frozen=True)
class Dpo(PreferenceObjective):
    """Mean, over all pairs, of -ln sigmoid(beta_c r_c - beta_r r_r)."""

    settings: DpoLoss

    def count(self, labels: Tensor, extras: Extras) -> Tensor:
        present = extras["present"]
        return (present[:, 0::2] & present[:, 1::2]).double().sum()

    def losses(
        self, log_ratio: Tensor, lengths: Tensor, extras: Extras
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        present = extras["present"]
        pairs = present[:, 0::2] & present[:, 1::2]
        beta = sequence_beta(
            lengths, beta=self.settings.beta, length_normalised=self.settings.length_normalised
        )
        implicit = beta.to(log_ratio.dtype) * log_ratio
        margin = implicit[:, 0::2] - implicit[:, 1::2]
        losses = torch.where(pairs, dpo(margin, self.settings.label_smoothing), 0.0)
        return losses, beta, {"margin": _sum(margin.detach(), pairs)}


@dataclass(frozen=True)
class BradleyTerry(Objective):
    """Mean, over all pairs, of -ln sigmoid(r_c - r_r - m) + c (r_c + r_r)^2; see
    `apertus_model.data.preferences.reward_samples` for the fields."""

    settings: RewardLoss
    fields = ("segments", "margins", "present")
    per_token = ("segments",)

    def count(self, labels: Tensor, extras: Extras) -> Tensor:
        return extras["present"].double().sum()

    def loss(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, vocab: VocabShard, batch: MicroBatch
    ) -> MicroBatchLoss:
        pairs, margins = batch.extras["present"], batch.extras["margins"]
        values = token_rewards(hidden, weight, labels, vocab)
        sums = sequence_sums(values, batch.extras["segments"], 2 * pairs.shape[1])
        rewards = (sums if batch.group is None else shared_sum(sums, batch.group)).to(values.dtype)
        chosen, rejected = rewards[:, 0::2], rewards[:, 1::2]
        losses = torch.where(pairs, bradley_terry(chosen, rejected, margins, self.settings.centring), 0.0)
        copies = dist.get_world_size(batch.group) if batch.group is not None else 1
        with torch.no_grad():
            columns = {
                "reward_chosen": _sum(chosen, pairs),
                "reward_rejected": _sum(rejected, pairs),
                "accuracy": _sum(chosen > rejected, pairs),
            }
        return MicroBatchLoss(losses.sum() / batch.denominator.to(losses.dtype), copies, columns)

    def heldout_loss(self, evaluator: Evaluator, samples: Sequence[Any]) -> HeldOutLoss:
        present = torch.from_numpy(np.stack([sample.present for sample in samples]))
        margins = torch.from_numpy(np.stack([sample.margins for sample in samples])).double()
        rewards = evaluator.sequence_rewards(samples, 2 * present.shape[1]).double()
        losses = bradley_terry(rewards[:, 0::2], rewards[:, 1::2], margins, self.settings.centring)[present]
        return HeldOutLoss(losses.mean().item(), losses.numel())


class ExtraPass(CrossEntropy):
    """The loss of the extra pass over a step's batch that an optimizer asks for (`optimizers.hook`).
    Its denominator is that of the step's own objective."""

    fields = ("weights", "places")
    per_token = ("weights", "places")

    def __init__(self, loss: ExtraLoss) -> None:
        super().__init__()
        self._extra_loss = loss

    def loss(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, vocab: VocabShard, batch: MicroBatch
    ) -> MicroBatchLoss:
        fields = {name: batch.extras[name] for name in self.fields}
        return MicroBatchLoss(
            self._extra_loss(hidden, weight, labels, vocab, **fields, denominator=batch.denominator)
        )


def with_places(inputs: Extras, labels: Tensor, rows: Sequence[int]) -> dict[str, Tensor]:
    """The inputs of a micro-batch with the fields of `ExtraPass`: weights, 1 if samples have none, and
    places.

    Args:
        inputs: name -> tensor; not changed.
        labels: (batch, sequence), whole rows.
        rows: index of each row in the step's batch.
    """
    length = labels.shape[1]
    places = torch.tensor(rows)[:, None] * length + torch.arange(length)
    return {"weights": torch.ones(labels.shape), **inputs, "places": places}


def _sum(values: Tensor, where: Tensor) -> Tensor:
    return torch.stack([torch.where(where, values.double(), 0.0).sum(), where.double().sum()])
