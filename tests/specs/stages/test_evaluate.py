"""Gates on metrics, buckets of positions, and evaluations that measure nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError

from specs.stages.evaluate import ByPosition, EvaluateStage, Gate


@pytest.mark.parametrize(
    ("bounds", "value", "reason"),
    [
        ({"max": 5}, 5.0, None),
        ({"max": 5}, 5.25, "gate on loss: 5.25 is above the allowed 5"),
        ({"min": 5}, 5.0, None),
        ({"min": 5}, 4.75, "gate on loss: 4.75 is below the required 5"),
        ({"max": 5}, math.nan, "gate on loss: nan is above the allowed 5"),
        ({"min": 5}, math.nan, "gate on loss: nan is below the required 5"),
    ],
)
def test_a_gate_says_why_it_is_not_met(bounds: dict[str, float], value: float, reason: str | None) -> None:
    gate = Gate.model_validate({"metric": "loss", **bounds})
    assert gate.failure({"loss": value}) == reason


def test_a_gate_on_a_metric_that_was_not_measured_names_the_others() -> None:
    assert Gate(metric="los", max=1).failure({"loss": 0.0, "bits": 1.0}) == (
        "gate on los: there is no such metric; use one of bits, loss"
    )


def test_buckets_of_positions_are_as_equal_as_whole_numbers_allow() -> None:
    assert ByPosition(sequence_length=1024, buckets=4).edges == [0, 256, 512, 768, 1024]
    assert ByPosition(sequence_length=20, buckets=3).edges == [0, 6, 13, 20]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "the stage measures nothing"),
        (
            {"harness": {"suites": {"a": {"tasks": ["x"]}}}, "by_position": {"sequence_length": 16}},
            "by_position needs sources",
        ),
    ],
)
def test_an_evaluation_measures_something(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        EvaluateStage.model_validate({"kind": "evaluate", "from": "pretrain", **fields})
