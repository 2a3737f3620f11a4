"""The loss of a reward model (Bradley-Terry)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from apertus_model.losses.cross_entropy import LastStates
from apertus_model.losses.preference import bradley_terry
from apertus_model.losses.sequences import sequence_sums, shared_sum, token_rewards
from apertus_model.trainer.evaluator import Evaluator, HeldOutLoss
from apertus_model.trainer.objectives.base import Extras, MicroBatch, MicroBatchLoss, Objective, column
from specs.stages.reward_model import RewardLoss


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
        values = token_rewards(states)
        sums = sequence_sums(values, batch.extras["segments"], 2 * pairs.shape[1])
        rewards = (sums if batch.group is None else shared_sum(sums, batch.group)).to(values.dtype)
        chosen, rejected = rewards[:, 0::2], rewards[:, 1::2]
        losses = torch.where(pairs, bradley_terry(chosen, rejected, margins, self.settings.centring), 0.0)
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
        rewards = evaluator.of_sequences(samples, 2 * present.shape[1], token_rewards).double()
        losses = bradley_terry(rewards[:, 0::2], rewards[:, 1::2], margins, self.settings.centring)[present]
        return HeldOutLoss(losses.mean().item(), losses.numel())


OBJECTIVES: dict[str, Callable[[Any], Objective]] = {
    "bradley-terry": lambda segment: BradleyTerry(segment.loss)
}
