"""The claims of papers that a recipe states on its figures, beside the stored results.

Invariant: a verdict follows from the interval alone. One seed has none, and shows nothing.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from operator import itemgetter
from statistics import NormalDist, fmean
from statistics import correlation as stdlib_correlation
from typing import NamedTuple

from flows.format import in_full
from flows.report.experiments import (
    Experiment,
    FigurePoint,
    Measurement,
    Points,
    by_label,
    front,
    mean,
    points_at,
)
from specs.errors import counted
from specs.figures import Claim, FigureSpec

LARGEST = 1 - 1e-15  # of a correlation whose interval is computed
CANNOT = "cannot be shown at this size"


class Tested(NamedTuple):
    """A claim beside the stored results."""

    text: str
    claim: Claim
    number: Measurement | None  # None where nothing is stored yet
    seeds: int  # of the seeds, or of the points of a correlation
    left_out: int = 0  # seeds of one series alone, or whose fronts reach no common part

    @property
    def verdict(self) -> str:
        """The side of 0 on which the interval lies, beside the expected one. An interval that contains 0
        shows neither a difference nor that there is none."""
        if self.number is None:
            return "not measured"
        _, low, high = self.number
        if low is not None and high is not None and (low > 0 or high < 0):
            side = "above" if low > 0 else "below"
            opposite = "a difference" if self.claim.expected == "at" else "the opposite"
            return "shown" if side == self.claim.expected else opposite
        if self.claim.expected == "at":
            return "no difference seen"
        return CANNOT if self.claim.cannot else "not shown"

    @property
    def reasoned(self) -> str:
        """The verdict, and why it says nothing of the paper."""
        return f"{CANNOT}: {self.claim.cannot}" if self.verdict == CANNOT else self.verdict

    @property
    def shown(self) -> str:
        """The number, its interval, and what it is a mean of."""
        if self.number is None:
            return "-"
        value, low, high = self.number
        interval = "" if low is None or high is None else f" ({in_full(low, 2)} to {in_full(high, 2)})"
        of = counted(self.seeds, "point" if self.claim.form == "correlation" else "seed")
        without = f" ({self.left_out} left out)" if self.left_out else ""
        return f"{in_full(value, 2)}{interval}, {of}{without}"


def claims_of(experiment: Experiment) -> list[Tested]:
    """The claims of a figure."""
    spec = experiment.spec
    return [_tested(text, claim, spec, experiment.single) for text, claim in spec.claims.items()]


def _tested(text: str, claim: Claim, spec: FigureSpec, series: Points) -> Tested:
    if claim.form == "correlation":
        pairs = [
            (point.x.value, point.y.value)
            for name in ([claim.of] if claim.of else series)
            for point in series[name]
            if point.x is not None
        ]
        return Tested(text, claim, correlation(pairs), len(pairs))
    if claim.at is not None:
        series = points_at(series, claim.at)
    of, than = (by_label(series[name]) for name in (claim.of, claim.than))
    values = []
    for label in of.keys() & than.keys():
        own, other = of[label], than[label]
        if claim.form == "front":
            value = front_distance(own, other, spec, claim.axis)
        elif spec.connect and len(own) != len(other):
            value = None  # a number on x is not stored yet
        else:
            value = fmean(_on(claim.axis, own)) - fmean(_on(claim.axis, other))
        if value is not None:
            values.append(value)
    left_out = len(of.keys() | than.keys()) - len(values)
    return Tested(text, claim, mean(values) if values else None, len(values), left_out)


def _on(axis: str, points: Sequence[FigurePoint]) -> list[float]:
    return [value.value for point in points if (value := getattr(point, axis)) is not None]


def correlation(pairs: Sequence[tuple[float, float]]) -> Measurement | None:
    """Pearson's correlation with its 95% interval by Fisher's transformation; None for fewer than four points
    or where all are equal on an axis."""
    if len(pairs) < 4 or any(len(set(values)) == 1 for values in zip(*pairs, strict=True)):
        return None
    r = max(-LARGEST, min(LARGEST, stdlib_correlation(*zip(*pairs, strict=True))))
    middle, spread = math.atanh(r), NormalDist().inv_cdf(0.975) / math.sqrt(len(pairs) - 3)
    return Measurement(r, math.tanh(middle - spread), math.tanh(middle + spread))


def front_distance(
    own: Sequence[FigurePoint], other: Sequence[FigurePoint], spec: FigureSpec, axis: str
) -> float | None:
    """How far one front lies from another along `axis`, on average over the part of the other axis that both
    reach, or of its logarithm if that axis is logarithmic, which has no place for numbers up to 0; None where
    they reach no common part. Fronts are joined by straight lines."""
    lines, along = [], spec.x if axis == "y" else spec.y
    logarithmic = along.scale == "log"
    for points in (own, other):
        best = front(list(points), spec.x.better, spec.y.better)
        places = zip(_on("x", best), _on("y", best), strict=True)
        line = [(x, y) if axis == "y" else (y, x) for x, y in places]
        if logarithmic:
            line = [(math.log(at), height) for at, height in line if at > 0]
        if not line:
            return None
        lines.append(sorted(line))
    low, high = max(line[0][0] for line in lines), min(line[-1][0] for line in lines)
    if low >= high:
        return None
    borders = {low, high, *(place for line in lines for place, _ in line if low < place < high)}
    gaps = [(at, _height(lines[0], at) - _height(lines[1], at)) for at in sorted(borders)]
    # exact: both are straight between the borders
    area = sum((right - left) * (a + b) / 2 for (left, a), (right, b) in pairwise(gaps))
    return area / (high - low)


def _height(line: Sequence[tuple[float, float]], at: float) -> float:
    """Of a line through points in the order of their places, at a place between the first and the last."""
    after = max(1, bisect_left(line, at, key=itemgetter(0)))
    (left, start), (right, end) = line[after - 1], line[after]
    return start + (end - start) * (at - left) / (right - left)
