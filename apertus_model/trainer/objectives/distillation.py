"""The objectives of distillation: the mean, over the kept labels of a step, of the losses of
`apertus_model.losses.distillation`, with a teacher beside the student or its stored predictions."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from apertus_model.losses.cross_entropy import LastStates, total_weight
from apertus_model.losses.distillation import StoredTeacher, Teacher, WholeTeacher, distillation
from apertus_model.model.on_host import copy_to
from apertus_model.trainer.objectives.base import Extras, LoadModel, MicroBatch, MicroBatchLoss, Objective
from specs.model import ModelSpec
from specs.stages.distill import DistillLoss


class _Distilled(Objective):
    def __init__(self, settings: DistillLoss, z_loss: float = 0.0) -> None:
        self._settings, self._z_loss = settings, z_loss

    def count(self, labels: Tensor, extras: Extras) -> Tensor:
        return total_weight(labels)

    def _loss(self, states: LastStates, batch: MicroBatch, teacher: Teacher) -> MicroBatchLoss:
        loss, sums = distillation(states, batch.denominator, teacher, self._settings, self._z_loss)
        kept = copy_to(total_weight(states.labels_BL), sums.device)
        names = ("divergence", "cross_entropy")
        columns = {name: torch.stack([total, kept]) for name, total in zip(names, sums, strict=True)}
        return MicroBatchLoss(loss, columns=columns)


class Distillation(_Distilled):
    """Distillation from a running teacher. It reads each micro-batch while the student's output layer waits,
    so that logits of both are made chunk by chunk."""

    def __init__(self, settings: DistillLoss, z_loss: float, teacher: ModelSpec) -> None:
        super().__init__(settings, z_loss)
        self._spec = teacher

    def begin(self, load: LoadModel) -> None:
        self._teacher = load("teacher", self._spec)

    def loss(self, states: LastStates, batch: MicroBatch) -> MicroBatchLoss:
        def compared(theirs: LastStates) -> MicroBatchLoss:
            hidden_ND = theirs.hidden_BLD.flatten(0, 1)
            teacher = WholeTeacher(hidden_ND, theirs.weight_VD, self._settings.temperature)
            with torch.enable_grad():
                return self._loss(states, batch, teacher)

        with torch.no_grad():
            loss: MicroBatchLoss = self._teacher(batch.tokens, **batch.arguments, loss_fn=compared)
        return loss


class StoredDistillation(_Distilled):
    """Distillation from stored predictions of the teacher, which are fields of the samples
    (`apertus_model.data.tokens.teacher_tokens`)."""

    fields = ("teacher_words", "teacher_log_p")
    per_token = ("teacher_words", "teacher_log_p")

    def loss(self, states: LastStates, batch: MicroBatch) -> MicroBatchLoss:
        words, log_p = (batch.extras[name].flatten(0, 1) for name in self.fields)
        return self._loss(states, batch, StoredTeacher(words, log_p))


OBJECTIVES: dict[str, Callable[[Any], Objective]] = {
    "distillation": lambda segment: Distillation(segment.loss, segment.z_loss, segment.teacher),
    "stored-distillation": lambda segment: StoredDistillation(segment.loss, segment.z_loss),
}
