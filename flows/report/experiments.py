"""The figures of a recipe (`specs/figures.py`): numbers of stored parts, by variant and series.

Invariant: there are only stored numbers. A variant without one is left out and named.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist, fmean, stdev
from typing import NamedTuple

from flows.report.results import numbers
from specs.figures import VARIANT, Axis, FigureSpec

T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
Metrics = Mapping[str, Mapping[str, float]]
"""Stage -> the numbers of its result, `val_loss` among them if it was measured at the stage's end."""


class Measurement(NamedTuple):
    """A number, and its interval if it has one."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class FigurePoint:
    """One point: a variant, or one number of a line."""

    variant: str
    text: str  # label beside the point
    x: Measurement | None  # None for a bar
    y: Measurement


Points = Mapping[str, list[FigurePoint]]
"""Points by series."""


@dataclass
class Experiment:
    """A figure of the recipe with its points."""

    spec: FigureSpec
    points: dict[str, list[FigurePoint]] = field(default_factory=dict)  # by series
    single: dict[str, list[FigurePoint]] = field(default_factory=dict)  # without means and differences
    missing: list[str] = field(default_factory=list)  # variants that are not stored yet

    @property
    def all_points(self) -> list[FigurePoint]:
        return [point for points in self.points.values() for point in points]


def experiment_of(spec: FigureSpec, metrics: Metrics) -> Experiment:
    """The points of a figure. `metrics` has every stage of the recipe."""
    experiment = Experiment(spec)
    for series, variants in spec.variants(metrics).items():
        for variant, text in variants.items():
            points = list(_points(spec, variant, text, metrics))
            experiment.points.setdefault(series, []).extend(points)
            if not points:
                experiment.missing.append(variant)
    experiment.single = experiment.points
    if spec.mean:
        experiment.points = {series: _means(spec, series, experiment.points) for series in experiment.points}
        experiment.points.pop(spec.against, None)
    return experiment


def _means(spec: FigureSpec, series: str, points: Points) -> list[FigurePoint]:
    """The mean of a series; where points are joined, the mean at each of their numbers on x, in order."""
    if not spec.connect:
        return _mean(spec, series, points)
    places = sorted({place_of(point) for point in points[series]})
    means = [(place, _mean(spec, series, points_at(points, place))) for place in places]
    return [replace(point, x=Measurement(place)) for place, at_place in means for point in at_place]


def points_at(points: Points, place: float) -> dict[str, list[FigurePoint]]:
    """The points of every series whose number on x is `place`."""
    return {
        series: [point for point in own if point.x is not None and point.x.value == place]
        for series, own in points.items()
    }


def by_label(points: Sequence[FigurePoint]) -> dict[str, list[FigurePoint]]:
    """The points by their labels, which are seeds."""
    grouped = defaultdict(list)
    for point in points:
        grouped[point.text].append(point)
    return grouped


def place_of(point: FigurePoint) -> float:
    assert point.x is not None, "a point of a line has a number"
    return point.x.value


def _mean(spec: FigureSpec, series: str, points: Points) -> list[FigurePoint]:
    """The mean of a series, or of its differences from `against` at equal labels; none without numbers."""
    own = points[series]
    if spec.against:
        others = {point.text: point for point in points[spec.against]}
        own = [_minus(point, others[point.text]) for point in own if point.text in others]
    if not own:
        return []
    xs = [point.x.value for point in own if point.x is not None]
    return [FigurePoint(series, "", mean(xs) if xs else None, mean([point.y.value for point in own]))]


def _minus(point: FigurePoint, other: FigurePoint) -> FigurePoint:
    x = Measurement(point.x.value - other.x.value) if point.x is not None and other.x is not None else None
    return FigurePoint(point.variant, point.text, x, Measurement(point.y.value - other.y.value))


def mean(values: Sequence[float]) -> Measurement:
    """The mean with its 95% interval by Student's t; a single number has none."""
    middle, count = fmean(values), len(values)
    if count < 2:
        return Measurement(middle)
    spread = student_t(count - 1) * stdev(values) / math.sqrt(count)
    return Measurement(middle, middle - spread, middle + spread)


def student_t(freedom: int) -> float:
    """The 97.5% quantile of Student's t. From a table up to 10 degrees of freedom, then by the expansion in
    1 / freedom (Abramowitz and Stegun 26.7.5), whose error is below 0.001."""
    if freedom <= len(T_QUANTILES):
        return T_QUANTILES[freedom - 1]
    z = NormalDist().inv_cdf(0.975)
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def _points(spec: FigureSpec, variant: str, text: str, metrics: Metrics) -> Iterator[FigurePoint]:
    of_y = _of(spec.y, variant, metrics)
    if spec.form == "lines":
        assert isinstance(spec.y.metric, str), "several metrics have no *"
        before, _, after = spec.y.metric.partition("*")
        times = of_y.get(spec.times, 0.0) if spec.times else 1.0
        numbered = re.compile(rf"{re.escape(before)}(\d+){re.escape(after)}")
        places = sorted(int(match[1]) for match in map(numbered.fullmatch, of_y) if match)
        for place in places if times else ():
            y = _value(of_y, f"{before}{place}{after}")
            assert y is not None, "the name is one of these"
            yield FigurePoint(variant, text, Measurement(place * times), y)
        return
    y = _value(of_y, spec.y.metric)
    x = _value(_of(spec.x, variant, metrics), spec.x.metric) if spec.x.metric else None
    if y is not None and (x is not None or not spec.x.metric):
        yield FigurePoint(variant, text, x, y)


def _of(axis: Axis, variant: str, metrics: Metrics) -> Mapping[str, float]:
    return numbers(metrics.get(axis.stage.replace(VARIANT, variant), {}))


def _value(metrics: Mapping[str, float], metric: str | list[str]) -> Measurement | None:
    """A number with its interval if it has one, or the mean of several numbers, which has none."""
    names = [metric] if isinstance(metric, str) else metric
    if not metrics.keys() >= {*names}:
        return None
    if isinstance(metric, str):
        return Measurement(metrics[metric], metrics.get(f"{metric}/low"), metrics.get(f"{metric}/high"))
    return Measurement(fmean(metrics[name] for name in names))


def front(points: list[FigurePoint], x_better: str | None, y_better: str | None) -> list[FigurePoint]:
    """The points, in the order of x, that no other beats: none is as good on both axes, better on one."""
    assert x_better and y_better, "the spec requires `better` of both axes"
    signs = (1 if x_better == "lower" else -1, 1 if y_better == "lower" else -1)
    costs = [(signs[0] * point.x.value, signs[1] * point.y.value) for point in points if point.x is not None]
    kept = [
        point
        for point, own in zip(points, costs, strict=True)
        if not any(other != own and other[0] <= own[0] and other[1] <= own[1] for other in costs)
    ]
    return sorted(kept, key=lambda point: point.x.value if point.x else 0.0)
