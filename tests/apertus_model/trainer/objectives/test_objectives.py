"""Every kind of training has the objective that its segments name."""

from __future__ import annotations

from typing import Any

import pytest

from apertus_model.trainer.objectives import OBJECTIVES as REGISTERED
from apertus_model.trainer.objectives import (
    cross_entropy,
    distillation,
    domain_weights,
    objective_of,
    preference,
)
from specs.capabilities import OBJECTIVES
from tests.apertus_model.harness import segment


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("pretrain", {}, cross_entropy.CrossEntropy),
        ("sft", {"prompt_weight": 0.5}, cross_entropy.WeightedCrossEntropy),
        ("sft", {"average": "conversations"}, cross_entropy.NormalisedCrossEntropy),
        ("sft", {"inverse_rl": {}}, cross_entropy.InverseRl),
        ("qrpo", {}, preference.Qrpo),
        ("dpo", {}, preference.Dpo),
        ("reward_model", {}, preference.BradleyTerry),
        ("distill", {}, distillation.Distillation),
        ("distill", {"top_k": 2}, distillation.StoredDistillation),
        ("domain_weights", {}, domain_weights.DomainWeights),
    ],
)
def test_a_segment_names_its_objective(kind: str, changes: dict[str, Any], expected: type) -> None:
    assert type(objective_of(segment(kind, **changes))) is expected


def test_the_table_of_capabilities_has_exactly_the_objectives_of_the_engine() -> None:
    assert REGISTERED.keys() == OBJECTIVES.keys()
