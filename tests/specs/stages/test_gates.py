"""Gates on metrics."""

from __future__ import annotations

import math

import pytest

from specs.stages.gates import Gate


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


def test_a_gate_on_a_metric_that_was_not_measured_names_the_nearest_or_all_others() -> None:
    missing = "there is no such metric"
    stored = {"loss": 0.0, "bits": 1.0}
    assert Gate(metric="los", max=1).failure(stored) == f"gate on los: {missing}; did you mean 'loss'?"
    assert Gate(metric="x", max=1).failure(stored) == f"gate on x: {missing}; use one of bits, loss."
