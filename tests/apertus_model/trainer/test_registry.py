"""Every kind of training has the objective that its segments name."""

from __future__ import annotations

from typing import Any

import pytest

from apertus_model.trainer import distillation, domain_weights, objectives
from apertus_model.trainer.registry import OBJECTIVES as REGISTERED
from apertus_model.trainer.registry import objective_of
from specs.capabilities import OBJECTIVES
from tests.apertus_model.harness import segment


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("pretrain", {}, objectives.CrossEntropy),
        ("sft", {"prompt_weight": 0.5}, objectives.WeightedCrossEntropy),
        ("sft", {"average": "conversations"}, objectives.NormalisedCrossEntropy),
        ("sft", {"inverse_rl": {}}, objectives.InverseRl),
        ("qrpo", {}, objectives.Qrpo),
        ("dpo", {}, objectives.Dpo),
        ("reward_model", {}, objectives.BradleyTerry),
        ("distill", {}, distillation.Distillation),
        ("distill", {"top_k": 2}, distillation.StoredDistillation),
        ("domain_weights", {}, domain_weights.DomainWeights),
    ],
)
def test_a_segment_names_its_objective(kind: str, changes: dict[str, Any], expected: type) -> None:
    assert type(objective_of(segment(kind, **changes))) is expected


def test_the_table_of_capabilities_has_exactly_the_objectives_of_the_engine() -> None:
    assert list(REGISTERED) == list(OBJECTIVES)
