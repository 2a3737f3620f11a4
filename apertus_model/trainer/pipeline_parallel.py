"""A model that is spread over a pipeline of ranks: the loss of its last stage, and held-out loss.

Invariants:
- No stage has the logits of a micro-batch: the last one computes its loss in the output layer
  (`model.output`).
- As for `Evaluator`, every rank makes the same number of forward passes; every stage knows the result.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.loss import IGNORE_INDEX, BaseLoss
from torchtitan.distributed import ParallelDims

from apertus_model.trainer.heldout import Evaluator, HeldOutLoss
from apertus_model.trainer.loader import SampleLike, collate

PipelinedLoss = Callable[[dict[str, torch.Tensor], torch.Tensor, torch.Tensor], torch.Tensor]


class OutputIsLoss(BaseLoss):
    """torchtitan's loss function of a pipeline: the output of the last stage is the loss."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        pass

    def __init__(self, config: Config, *, compile_config: Any = None) -> None:
        self.fn = lambda loss, labels: loss


class PipelineEvaluator(Evaluator):
    """Scores rows with the pipeline of a training run. What needs logits on every rank is not for pipelines:
    the specs refuse it."""

    def __init__(
        self, stage: torch.nn.Module, loss: PipelinedLoss, parallel_dims: ParallelDims, device: torch.device, *, batch_size: int
    ) -> None:
        """`loss`: see `ApertusTrainer.pipelined_loss`; `batch_size`: rows that it takes; `stage`: a part of
        the model, for its layout."""
        super().__init__(stage, parallel_dims, device, batch_size=batch_size)
        self._loss = loss

    @torch.no_grad()
    def loss(self, samples: Sequence[SampleLike]) -> HeldOutLoss:
        """As `Evaluator.loss`."""
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        for rows in self._own_rows(samples):
            inputs, labels = collate(rows)
            inputs, labels = {name: tensor.to(self.device) for name, tensor in inputs.items()}, labels.to(self.device)
            total[0] += self._loss(inputs, labels, torch.ones((), device=self.device)).double()
            (own,) = self._split(labels)
            total[1] += (own != IGNORE_INDEX).sum()
        nats, tokens = self._over_all_ranks(total).tolist()
        if tokens == 0:
            raise ValueError(f"the {len(samples)} held-out sequences have no label to score")
        return HeldOutLoss(nats / tokens, int(tokens))
