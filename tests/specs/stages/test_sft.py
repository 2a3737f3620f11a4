"""Which conversations are trained on, how often, and by which objective."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from specs.stages.sft import InverseRl, SftLoss, SftSegment, SftStage


@pytest.mark.parametrize(
    ("stated", "repeats"),
    [
        ("chat", {"chat": 1}),
        (["chat/a", "chat/b"], {"chat/a": 1, "chat/b": 1}),
        ({"chat/a": 3}, {"chat/a": 3}),
        ({"chat/a": 0.5, "chat/b": 2.0}, {"chat/a": 0.5, "chat/b": 2}),
    ],
)
def test_conversations_are_seen_once_per_epoch_unless_stated(stated: Any, repeats: dict[str, float]) -> None:
    fields = {"kind": "sft", "from": "base", "budget": "4 steps", "conversations": stated}
    assert SftStage.model_validate(fields).conversations == repeats


@pytest.mark.parametrize(("weight", "objective"), [(0.0, "cross-entropy"), (0.1, "weighted-cross-entropy")])
def test_a_weight_of_other_tokens_needs_a_weighted_loss(weight: float, objective: str) -> None:
    segment = SftSegment.model_construct(repeats=[1], prompt_weight=weight)
    assert segment.objective == objective


@pytest.mark.parametrize("number", [0, -1, 0.0, -0.5])
def test_a_source_is_not_seen_less_than_not_at_all(number: float) -> None:
    fields = {"kind": "sft", "from": "base", "budget": "4 steps", "conversations": {"chat/a": number}}
    with pytest.raises(
        ValidationError, match="passes train on nothing; set more than 0, or leave the source out"
    ):
        SftStage.model_validate(fields)


@pytest.mark.parametrize(
    ("fields", "objective"),
    [
        ({"prompt_weight": 0.05, "length_normalised": True}, "normalised-cross-entropy"),
        ({"average": "conversations"}, "normalised-cross-entropy"),
        ({"inverse_rl": InverseRl()}, "inverse-rl"),
    ],
)
def test_each_variant_of_the_loss_has_its_objective(fields: Any, objective: str) -> None:
    assert SftLoss(**fields).objective == objective


def test_a_variant_without_effect_is_refused() -> None:
    with pytest.raises(ValidationError, match="length_normalised changes nothing with prompt_weight: 0"):
        SftLoss(length_normalised=True)


def test_options_that_are_not_taken_are_in_no_fingerprint() -> None:
    values = dict.fromkeys(("model", "optimizer", "schedule", "sequence_length", "global_batch_size"))
    part = SftSegment.model_construct(repeats=[1], end_step=1, **values)  # type: ignore[arg-type]
    new = {"length_normalised", "average", "inverse_rl", "packing", "prompt_weight"}
    assert not new & set(part.identity_fields())
    assert part.identity_fields()["repeats"] == [1]
