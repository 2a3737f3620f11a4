"""The claims of a figure beside stored numbers: differences, fronts, correlations and verdicts."""

from __future__ import annotations

import math
from typing import Any

import pytest

from flows.report.claims import Tested, claims_of
from flows.report.experiments import Measurement, experiment_of
from specs.figures import FigureSpec

SERIES = {"A": "a-*", "B": "b-*"}
DIFFERENCE = {"paper": "0.1 less", "of": "B", "than": "A", "expected": "below"}


def claimed(metrics: dict[str, dict[str, float]], claim: dict[str, Any], **fields: Any) -> Tested:
    figure = {"title": "t", "y": {"stage": "e-{variant}", "metric": "m"}, "series": SERIES} | fields
    spec = FigureSpec.model_validate(figure | {"claims": {"it is so": claim}})
    (result,) = claims_of(experiment_of(spec, metrics))
    return result


def numbers(a: list[float], b: list[float]) -> dict[str, dict[str, float]]:
    return {
        f"e-{name}-{seed}": {"m": value}
        for name, values in (("a", a), ("b", b))
        for seed, value in enumerate(values)
    }


@pytest.mark.parametrize(
    ("b", "verdict"),
    [([1.0, 2.1, 2.9], "shown"), ([3.0, 4.1, 4.9], "the opposite"), ([1.0, 4.1, 2.9], "not shown")],
)
def test_a_verdict_says_on_which_side_of_0_the_interval_of_the_differences_lies(
    b: list[float], verdict: str
) -> None:
    result = claimed(numbers([2.0, 3.0, 4.0], b), DIFFERENCE)
    differences = [own - other for own, other in zip(b, [2.0, 3.0, 4.0], strict=True)]
    assert result.number is not None and result.number.value == pytest.approx(sum(differences) / 3)
    assert result.verdict == verdict and result.seeds == 3
    above = claimed(numbers([2.0, 3.0, 4.0], b), DIFFERENCE | {"expected": "above"}).verdict
    assert above == {"shown": "the opposite", "the opposite": "shown"}.get(verdict, verdict)
    level = claimed(numbers([2.0, 3.0, 4.0], b), DIFFERENCE | {"expected": "at"}).verdict
    assert level == ("no difference seen" if verdict == "not shown" else "a difference")


def test_one_seed_shows_nothing_and_seeds_without_a_pair_are_not_counted() -> None:
    result = claimed({"e-a-1": {"m": 1.0}, "e-b-1": {"m": 0.0}, "e-b-2": {"m": 0.0}}, DIFFERENCE)
    assert (result.number, result.verdict, result.shown) == (
        Measurement(-1.0),
        "not shown",
        "-1, 1 seed (1 left out)",
    )
    assert claimed({"e-a-1": {"m": 1.0}, "e-b-2": {"m": 1.0}}, DIFFERENCE).verdict == "not measured"


def test_a_size_that_is_too_small_is_no_excuse_for_a_result() -> None:
    cannot = DIFFERENCE | {"cannot": "too few steps"}
    assert claimed(numbers([2, 3, 4], [1, 4.1, 2.9]), cannot).reasoned.endswith(": too few steps")
    assert claimed(numbers([2, 3, 4], [3, 4.1, 4.9]), cannot).reasoned == "the opposite"
    assert claimed(numbers([2, 3, 4], [1, 2.1, 2.9]), cannot).reasoned == "shown"


POINTS = {
    "x": {"stage": "e-{variant}", "metric": "x", "better": "lower"},
    "y": {"stage": "e-{variant}", "metric": "y", "better": "lower"},
}


def test_a_front_is_compared_where_both_lines_reach_on_the_other_axis() -> None:
    """Of seed 1, the line of B from (1, 2) to (2, 0) lies 1 below that of A from (0, 5) to (2, 1), where x is
    1 to 2: A is at 3 and 1, B at 2 and 0. A third point of B that both others beat does not count. Along x,
    where y is 1 to 2, A is at 2 and 1.5, B at 1.5 and 1."""
    at = {"a-p": (0.0, 5.0), "a-q": (2.0, 1.0), "b-p": (1.0, 2.0), "b-q": (2.0, 0.0), "b-r": (3.0, 3.0)}
    metrics = {f"e-{name}": {"x": x, "y": y} for name, (x, y) in at.items()}
    series = {"A": {"a-*": "1"}, "B": {"b-*": "1"}}
    claim = DIFFERENCE | {"form": "front"}
    along_y = claimed(metrics, claim, series=series, **POINTS)
    assert along_y.number == Measurement(pytest.approx(-1.0)) and along_y.seeds == 1
    along_x = claimed(metrics, claim | {"axis": "x"}, series=series, **POINTS)
    assert along_x.number == Measurement(pytest.approx(-0.5))
    metrics["e-b-p"] = {"x": 7.0, "y": 2.0}
    metrics["e-b-q"] = {"x": 8.0, "y": 0.0}
    assert claimed(metrics, claim | {"of": "B"}, series=series, **POINTS).seeds == 0


def test_a_difference_can_be_of_the_points_at_one_number_on_x() -> None:
    """B is 1 below A at 8 and 3 above it at 16, in both seeds: 1 above on average."""
    at = {(8, "a"): 5.0, (8, "b"): 4.0, (16, "a"): 2.0, (16, "b"): 5.0}
    metrics = {
        f"e-{name}-{seed}-{x}": {"x": float(x), "y": y + seed}
        for (x, name), y in at.items()
        for seed in (1, 2)
    }
    fields: dict[str, Any] = {"series": {"A": "a-*-*", "B": "b-*-*"}, **POINTS}
    for place, number in ((8, -1), (16, 3), (None, 1)):
        result = claimed(metrics, DIFFERENCE | {"at": place}, **fields)
        assert result.number == Measurement(number, number, number) and result.seeds == 2
    assert claimed(metrics, DIFFERENCE | {"at": 9}, **fields).verdict == "not measured"
    del metrics["e-b-2-16"]  # of these two seeds, one has not reached it
    partly = claimed(metrics, DIFFERENCE, connect=True, **fields)
    assert (partly.number, partly.seeds, partly.left_out) == (Measurement(1), 1, 1)


def test_fronts_of_lines_are_compared_along_a_logarithm_where_the_axis_is_one() -> None:
    """No place is left for 0. Numbers 1 and 4, which take A 1 and 4 seconds, and B 2 and 8: from 2 to 4
    seconds, A is at 2.5 to 4 by the logarithm of the seconds, and B at 1 to 2.5."""
    metrics = {
        f"e-{name}-1": {"n/0": 0.0, "n/1": 1.0, "n/4": 4.0, "s": s} for name, s in (("a", 1.0), ("b", 2.0))
    }
    fields = {
        "x": {"scale": "log", "better": "lower"},
        "y": {"stage": "e-{variant}", "metric": "n/*", "better": "higher"},
        "times": "s",
        "series": {"A": {"a-*": ""}, "B": {"b-*": ""}},
    }
    claim = DIFFERENCE | {"form": "front", "of": "A", "than": "B", "expected": "above"}
    assert claimed(metrics, claim, **fields).number == Measurement(pytest.approx(1.5))


def test_a_correlation_has_the_interval_of_fisher() -> None:
    """Of x = 0..4 and y = 0, 2, 1, 3, 5: r = 11 / sqrt(10 x 14.8)."""
    ys = [0.0, 2.0, 1.0, 3.0, 5.0]
    metrics = {f"e-a-{seed}": {"x": float(seed), "y": y} for seed, y in enumerate(ys)}
    claim = {"paper": "-0.7", "form": "correlation", "expected": "below"}
    result = claimed(metrics, claim, series={"A": "a-*"}, **POINTS)
    r = 11 / math.sqrt(10 * 14.8)
    half = 1.959964 / math.sqrt(2)
    assert result.number is not None and result.seeds == 5
    assert result.number == pytest.approx(
        (r, math.tanh(math.atanh(r) - half), math.tanh(math.atanh(r) + half))
    )
    few = claimed(dict(list(metrics.items())[:3]), claim, series={"A": "a-*"}, **POINTS)
    assert few.verdict == "not measured"


@pytest.mark.parametrize(
    ("claim", "fields", "problem"),
    [
        ({"of": "C"}, {}, "'C' is no series of the figure"),
        ({"than": ""}, {}, "'' is no series"),
        ({"form": "front"}, {}, "needs points or lines"),
        ({"form": "correlation", "of": "", "than": ""}, {}, "needs points"),
        ({"axis": "x"}, {}, "no single number on x"),
        ({}, {"y": {"stage": "e-{variant}", "metric": "m/*"}}, "no single number on y"),
        ({"at": 1}, {}, "a difference of points"),
        ({"form": "front", "at": 1}, POINTS, "a difference of points"),
        ({"form": "correlation"}, POINTS, "leave out `than`"),
        ({"form": "front"}, POINTS | {"x": {"stage": "e-{variant}", "metric": "x"}}, "needs `better`"),
    ],
)
def test_a_claim_that_the_figure_cannot_answer_is_refused(
    claim: dict[str, Any], fields: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        claimed({}, DIFFERENCE | claim, **fields)
