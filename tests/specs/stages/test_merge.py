"""Rules and weights of a merge."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from specs.stages.merge import MergeStage


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0], "1 weights for 2 checkpoints; give one for each"),
        ([1.0, 2.0, 3.0], "3 weights for 2 checkpoints"),
        ([0.0, 0.0], "must not all be zero"),
        ([1.7e308, 1.7e308], "their sum must be finite"),
        ([-1.0, 2.0], "-1 is a negative weight, which only method: task-arithmetic can have"),
    ],
)
def test_weights_that_make_no_average_are_refused(weights: list[float], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        MergeStage.model_validate({"kind": "merge", "checkpoints": ["a", "b"], "weights": weights})


@pytest.mark.parametrize("weights", [None, [0.0, 1.0], [3.0, 1.0]])
def test_a_weight_may_be_zero_and_none_is_needed(weights: list[float] | None) -> None:
    stage = MergeStage.model_validate({"kind": "merge", "checkpoints": ["a", "b"], "weights": weights})
    assert stage.weights == weights


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"base": "c"}, "an average has no base; leave it out, or set method"),
        ({"scale": 0.5}, "an average has no scale"),
        ({"density": 0.2}, "density belongs to method: ties, and the method is average"),
        ({"method": "ties"}, "method: ties needs base, the checkpoint that the others were trained from"),
        ({"method": "ties", "base": "c", "density": 0}, "greater than 0"),
        ({"method": "ties", "base": "c", "weights": [-1, 2]}, "-1 is a negative weight"),
        ({"method": "ties", "base": "c", "checkpoints": ["a"]}, "merges two checkpoints or more"),
        ({"method": "task-arithmetic", "base": "c", "density": 0.2}, "the method is task-arithmetic"),
        ({"method": "task-arithmetic", "base": "c", "scale": float("inf")}, "finite"),
        ({"method": "dare"}, "'average', 'task-arithmetic' or 'ties'"),
        ({"checkpoints": ["a"]}, "merges two checkpoints or more"),
    ],
)
def test_rules_without_sense_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        MergeStage.model_validate({"kind": "merge", "checkpoints": ["a", "b"], **fields})


def test_a_task_vector_can_be_subtracted() -> None:
    fields = {"method": "task-arithmetic", "base": "c", "checkpoints": ["a"], "weights": [-0.5]}
    assert MergeStage.model_validate({"kind": "merge", **fields}).kept == 1.0


def test_ties_keeps_a_fifth_by_default() -> None:
    stated = {"kind": "merge", "checkpoints": ["a", "b"], "method": "ties", "base": "c"}
    assert MergeStage.model_validate(stated).kept == 0.2
    assert MergeStage.model_validate(stated | {"density": 0.5}).kept == 0.5
