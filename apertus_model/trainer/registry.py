"""The objectives by name; `specs.capabilities` states what is known of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from apertus_model.trainer.alignment import Alignment
from apertus_model.trainer.distillation import Distillation, StoredDistillation
from apertus_model.trainer.domain_weights import DomainWeights
from apertus_model.trainer.objectives import (
    BradleyTerry,
    CrossEntropy,
    Dpo,
    InverseRl,
    NormalisedCrossEntropy,
    Objective,
    Qrpo,
    WeightedCrossEntropy,
)

OBJECTIVES: dict[str, Callable[[Any], Objective]] = {
    "cross-entropy": lambda segment: CrossEntropy(segment.z_loss),
    "weighted-cross-entropy": lambda segment: WeightedCrossEntropy(),
    "normalised-cross-entropy": lambda segment: NormalisedCrossEntropy(),
    "inverse-rl": lambda segment: InverseRl(segment.inverse_rl),
    "qrpo": lambda segment: Qrpo(segment.loss),
    "dpo": lambda segment: Dpo(segment.loss),
    "bradley-terry": lambda segment: BradleyTerry(segment.loss),
    "distillation": lambda segment: Distillation(segment.loss, segment.z_loss, segment.teacher),
    "alignment": lambda segment: Alignment(segment.loss.compare, segment.model, segment.teacher),
    "stored-distillation": lambda segment: StoredDistillation(segment.loss, segment.z_loss),
    "domain-weights": lambda segment: DomainWeights(
        segment.update,
        segment.sources,
        segment.targets,
        clip=segment.optimizer.grad_clip,
        rate=segment.lr_at,
        names=segment.source_names,
        z_loss=segment.z_loss,
    ),
}


def objective_of(segment: Any) -> Objective:
    return OBJECTIVES[segment.objective](segment)
