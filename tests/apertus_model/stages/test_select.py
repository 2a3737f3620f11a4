"""What a selection chooses, and what it says when it cannot choose."""

from __future__ import annotations

import math
from typing import Any

import pytest

from apertus_model.stages.select import choose
from infra.store import Artifact, Attempt
from specs.errors import StageError


def evaluations(bench: Any, *metrics: dict[str, float]) -> dict[str, Artifact]:
    """Stored evaluations, in order."""
    found = {}
    for index, values in enumerate(metrics):
        attempt = Attempt(bench.job("evaluate", f"evaluation{index}"))
        attempt.begin()
        attempt.commit(metrics=values)
        found[f"evaluation:{index}"] = attempt.artifact
    return found


def select(bench: Any, inputs: dict[str, Artifact], **spec: Any) -> dict[str, float]:
    fields = {
        "metric": "reward/mean",
        "best": "lowest",
        "names": [f"model-{index}" for index in range(len(inputs))],
        **spec,
    }
    metrics: dict[str, float] = bench.run(
        "select", f"select-{spec.get('best')}", fields, inputs
    ).manifest.metrics
    return metrics


def test_the_first_of_the_best_is_chosen_and_every_value_is_stored(bench: Any) -> None:
    inputs = evaluations(
        bench, {"reward/mean": 0.5}, {"reward/mean": 0.7}, {"reward/mean": 0.25}, {"reward/mean": 0.7}
    )
    values = {"value/model-0": 0.5, "value/model-1": 0.7, "value/model-2": 0.25, "value/model-3": 0.7}
    assert select(bench, inputs, best="highest") == {"chosen": 1, "value": 0.7} | values
    assert select(bench, inputs, best="lowest") == {"chosen": 2, "value": 0.25} | values


def test_a_metric_that_is_missing_is_an_error_that_lists_those_there_are(bench: Any) -> None:
    with pytest.raises(
        StageError, match="'model-1' has no metric 'reward/mean'; it has perplexity, reward/finished"
    ):
        select(bench, evaluations(bench, {"reward/mean": 0.5}, {"reward/finished": 1.0, "perplexity": 2.0}))


@pytest.mark.parametrize("best", ["lowest", "highest"])
def test_a_training_that_diverged_is_never_chosen(best: Any) -> None:
    assert choose([math.nan, 2.0, math.inf, -math.inf], best) == 1
    with pytest.raises(StageError, match="none of the 2 candidates has a finite value"):
        choose([math.nan, math.inf], best)
