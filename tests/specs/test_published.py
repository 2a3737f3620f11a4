"""Published scores beside ours: units, and the standard error of the difference."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError

from specs.published import PublishedScore, standard_error

SOURCE = "a report, table 3"


def score(**fields: Any) -> PublishedScore:
    return PublishedScore.model_validate({"source": SOURCE, **fields})


@pytest.mark.parametrize(
    ("stated", "metrics", "expected"),
    [
        # 3 and 4 thousandths are 5 together
        (
            {"value": 61.5, "unit": "percent", "stderr": 0.4},
            {"acc": 0.625, "acc_stderr": 0.003},
            (0.625, 0.615, 0.01, 0.005, "both"),
        ),
        (
            {"value": 61.5, "unit": "percent"},
            {"acc": 0.625, "acc_stderr": 0.003},
            (0.625, 0.615, 0.01, 0.003, "ours alone"),
        ),
        ({"value": 12.0, "unit": "metric"}, {"acc": 12.5}, (12.5, 12.0, 0.5, None, "unknown")),
        ({"value": 12.0, "unit": "metric", "stderr": 0.1}, {"acc": 12.5}, (12.5, 12.0, 0.5, None, "unknown")),
        ({"value": 50, "unit": "percent"}, {"acc_stderr": 0.1}, (None, 0.5, None, None, "unknown")),
    ],
)
def test_the_difference_has_the_error_of_both_where_both_are_known(
    stated: dict[str, Any], metrics: dict[str, float], expected: tuple[Any, ...]
) -> None:
    found = score(**stated).compared("acc", metrics)
    assert (found.metric, found.source) == ("acc", SOURCE)
    values = (found.ours, found.published, found.difference, found.stderr, found.stderr_of)
    assert values == tuple(pytest.approx(value) if isinstance(value, float) else value for value in expected)


def test_an_interval_gives_the_standard_error_of_a_normal_distribution() -> None:
    metrics = {"x": 1.0, "x/low": 1 - 1.96 * 0.25, "x/high": 1 + 1.96 * 0.25}
    assert standard_error("x", metrics) == pytest.approx(0.25, rel=1e-4)
    assert standard_error("x", metrics | {"x_stderr": 0.5}) == 0.5
    assert standard_error("y", metrics) is None


def test_the_standard_error_of_a_task_with_a_filter_stands_before_the_filter() -> None:
    metrics = {"suite/task/exact_match/strict": 0.5, "suite/task/exact_match_stderr/strict": 0.01}
    assert standard_error("suite/task/exact_match/strict", metrics) == 0.01


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"value": 130, "unit": "percent"}, "130 is no percentage; set a value from 0 to 100, or unit"),
        ({"value": 0.6}, "unit"),
        ({"value": 0.6, "unit": "metric", "stderr": -1}, "greater than or equal to 0"),
        ({"value": math.nan, "unit": "metric"}, "finite"),
        ({"value": 0.6, "unit": "metric", "source": ""}, "at least 1 character"),
    ],
)
def test_a_score_without_unit_source_or_sense_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        score(**fields)


def test_a_score_enters_no_fingerprint() -> None:
    assert score(value=1, unit="metric").identity_fields() == {}
