"""Buckets of positions, and evaluations that measure nothing."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from specs.stages.evaluate import ByPosition, EvaluateStage


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
