"""Which conversations are trained on, how often, and by which objective."""

from __future__ import annotations

from typing import Any

import pytest

from specs.stages.sft import SftSegment, SftStage


@pytest.mark.parametrize(
    ("stated", "repeats"),
    [
        ("chat", {"chat": 1}),
        (["chat/a", "chat/b"], {"chat/a": 1, "chat/b": 1}),
        ({"chat/a": 3}, {"chat/a": 3}),
    ],
)
def test_conversations_are_seen_once_per_epoch_unless_stated(stated: Any, repeats: dict[str, int]) -> None:
    fields = {"kind": "sft", "from": "base", "budget": "4 steps", "conversations": stated}
    assert SftStage.model_validate(fields).conversations == repeats


@pytest.mark.parametrize(("weight", "objective"), [(0.0, "cross-entropy"), (0.1, "weighted-cross-entropy")])
def test_a_weight_of_other_tokens_needs_a_weighted_loss(weight: float, objective: str) -> None:
    segment = SftSegment.model_construct(repeats=[1], prompt_weight=weight)
    assert segment.objective == objective
