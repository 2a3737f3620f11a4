"""Losses on pairs of completions: QRPO and DPO, on log-ratios to a reference; Bradley-Terry, on rewards."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from apertus_model.losses import preference as formulas
from apertus_model.losses import sequences
from apertus_model.losses.cross_entropy import LastStates, log_probabilities
from apertus_model.model.on_host import copy_to
from apertus_model.trainer.evaluator import Evaluator, HeldOutLoss
from apertus_model.trainer.objectives.base import Extras, MicroBatch, MicroBatchLoss, Objective, column
from specs.stages.dpo import DpoLoss
from specs.stages.qrpo import QrpoLoss
from specs.stages.reward_model import RewardLoss

Losses = tuple[Tensor, Tensor, dict[str, Tensor]]
"""The losses, 0 where no sequence is present; beta_i of each sequence; further columns."""


class PreferenceObjective(Objective):
    """A loss on the log-ratios to the reference; `apertus_model.data.preferences.samples` has the fields."""

    fields = ("segments", "rewards", "reference", "present")
    per_token = ("segments",)

    def loss(self, states: LastStates, batch: MicroBatch) -> MicroBatchLoss:
        extras, group = batch.extras, batch.group
        present, reference = extras["present"], extras["reference"]
        log_p = log_probabilities(states)
        labels = copy_to(states.labels_BL, log_p.device)
        total, lengths = sequences.sequence_log_probabilities(
            log_p, labels, extras["segments"], present.shape[1], group
        )
        log_ratio = torch.where(present, total - reference, 0.0)
        losses, beta, columns = self.losses(log_ratio, lengths, extras)
        copies = dist.get_world_size(group) if group is not None else 1
        with torch.no_grad():
            pairs = present[:, 0::2] & present[:, 1::2]
            implicit = beta.to(log_ratio.dtype) * log_ratio
            columns = {
                "log_ratio": column(log_ratio, present),
                "log_ratio_chosen": column(log_ratio[:, 0::2], pairs),
                "log_ratio_rejected": column(log_ratio[:, 1::2], pairs),
                "accuracy": column(implicit[:, 0::2] > implicit[:, 1::2], pairs),
                **columns,
            }
        return MicroBatchLoss(losses.sum() / batch.denominator.to(losses.dtype), copies, columns)

    @abstractmethod
    def losses(self, log_ratio: Tensor, lengths: Tensor, extras: Extras) -> Losses:
        """The losses, 0 where no sequence is present; beta_i of each sequence; further columns."""


@dataclass(frozen=True)
class Qrpo(PreferenceObjective):
    """Mean of (q - beta_i ln Z(beta_i) - beta_i r)^2 over all sequences, chosen and rejected alike."""

    settings: QrpoLoss

    def count(self, labels: Tensor, extras: Extras) -> Tensor:
        return extras["present"].double().sum()

    def losses(self, log_ratio: Tensor, lengths: Tensor, extras: Extras) -> Losses:
        settings = self.settings
        present, quantiles = extras["present"], extras["rewards"]
        beta = formulas.sequence_beta(
            lengths,
            beta=settings.beta,
            length_normalised=settings.length_normalised,
            beta_max=settings.beta_max,
        )
        residual = torch.where(present, formulas.qrpo_residual(log_ratio, quantiles, beta), 0.0)
        target = quantiles.double() - formulas.beta_log_partition(beta)
        columns = {"target": column(target, present), "residual": column(residual.detach(), present)}
        return residual.square(), beta, columns


@dataclass(frozen=True)
class Dpo(PreferenceObjective):
    """Mean, over all pairs, of -ln sigmoid(beta_c r_c - beta_r r_r)."""

    settings: DpoLoss

    def count(self, labels: Tensor, extras: Extras) -> Tensor:
        present = extras["present"]
        return (present[:, 0::2] & present[:, 1::2]).double().sum()

    def losses(self, log_ratio: Tensor, lengths: Tensor, extras: Extras) -> Losses:
        present = extras["present"]
        pairs = present[:, 0::2] & present[:, 1::2]
        beta = formulas.sequence_beta(
            lengths, beta=self.settings.beta, length_normalised=self.settings.length_normalised
        )
        implicit = beta.to(log_ratio.dtype) * log_ratio
        margin = implicit[:, 0::2] - implicit[:, 1::2]
        losses = torch.where(pairs, formulas.dpo(margin, self.settings.label_smoothing), 0.0)
        return losses, beta, {"margin": column(margin.detach(), pairs)}


@dataclass(frozen=True)
class BradleyTerry(Objective):
    """Mean, over all pairs, of -ln sigmoid(r_c - r_r - m) + c (r_c + r_r)^2; see
    `apertus_model.data.preferences.reward_samples` for the fields."""

    settings: RewardLoss
    fields = ("segments", "margins", "present")
    per_token = ("segments",)

    def count(self, labels: Tensor, extras: Extras) -> Tensor:
        return extras["present"].double().sum()

    def loss(self, states: LastStates, batch: MicroBatch) -> MicroBatchLoss:
        pairs, margins = batch.extras["present"], batch.extras["margins"]
        values = sequences.token_rewards(states)
        sums = sequences.sequence_sums(values, batch.extras["segments"], 2 * pairs.shape[1])
        rewards = (sums if batch.group is None else sequences.shared_sum(sums, batch.group)).to(values.dtype)
        chosen, rejected = rewards[:, 0::2], rewards[:, 1::2]
        losses = formulas.bradley_terry(chosen, rejected, margins, self.settings.centring)
        losses = torch.where(pairs, losses, 0.0)
        copies = dist.get_world_size(batch.group) if batch.group is not None else 1
        with torch.no_grad():
            columns = {
                "reward_chosen": column(chosen, pairs),
                "reward_rejected": column(rejected, pairs),
                "accuracy": column(chosen > rejected, pairs),
            }
        return MicroBatchLoss(losses.sum() / batch.denominator.to(losses.dtype), copies, columns)

    def heldout_loss(self, evaluator: Evaluator, samples: Sequence[Any]) -> HeldOutLoss:
        present = torch.from_numpy(np.stack([sample.present for sample in samples]))
        margins = torch.from_numpy(np.stack([sample.margins for sample in samples])).double()
        rewards = evaluator.of_sequences(samples, 2 * present.shape[1], sequences.token_rewards).double()
        chosen, rejected = rewards[:, 0::2], rewards[:, 1::2]
        losses = formulas.bradley_terry(chosen, rejected, margins, self.settings.centring)[present]
        return HeldOutLoss(losses.mean().item(), losses.numel())


OBJECTIVES: dict[str, Callable[[Any], Objective]] = {
    "qrpo": lambda segment: Qrpo(segment.loss),
    "dpo": lambda segment: Dpo(segment.loss),
    "bradley-terry": lambda segment: BradleyTerry(segment.loss),
}
