"""Weights of an average."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from specs.stages.merge import MergeStage


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0], "1 weights for 2 checkpoints; state one for each"),
        ([1.0, 2.0, 3.0], "3 weights for 2 checkpoints"),
        ([0.0, 0.0], "must not all be zero"),
        ([1.7e308, 1.7e308], "their sum must be finite"),
        ([-1.0, 2.0], "greater than or equal to 0"),
    ],
)
def test_weights_that_make_no_average_are_refused(weights: list[float], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        MergeStage.model_validate({"kind": "merge", "checkpoints": ["a", "b"], "weights": weights})


@pytest.mark.parametrize("weights", [None, [0.0, 1.0], [3.0, 1.0]])
def test_a_weight_may_be_zero_and_none_is_needed(weights: list[float] | None) -> None:
    stage = MergeStage.model_validate({"kind": "merge", "checkpoints": ["a", "b"], "weights": weights})
    assert stage.weights == weights
