"""Ranks of the series of a figure whose variants are seeds, and the ranks that the seeds leave open.

Two series are told apart if the 95% interval of their differences, seed by seed, does not contain 0. Each
pair is tested by itself: of twelve equal series, three of the 66 pairs are told apart by chance.
"""

from itertools import combinations
from statistics import fmean
from typing import NamedTuple

from flows.report.experiments import Experiment, FigurePoint, mean


class Rank(NamedTuple):
    """A series with its rank by the mean, 1 for the best. `best` and `worst` are the ranks that are left
    to it between the series that are told apart from it."""

    series: str
    rank: int
    best: int
    worst: int
    alike: list[str]  # the series that are not told apart from it

    @property
    def shown(self) -> str:
        return str(self.rank) if self.best == self.worst else f"{self.rank} ({self.best} to {self.worst})"


def ranks(experiment: Experiment) -> list[Rank]:
    """The series that have numbers, the best first. Points of two series with equal labels are compared."""
    sign = -1.0 if experiment.spec.y.better == "higher" else 1.0
    costs = {series: _costs(points, sign) for series, points in experiment.single.items() if points}
    ahead: dict[str, set[str]] = {series: set() for series in costs}
    behind: dict[str, set[str]] = {series: set() for series in costs}
    for series, other in combinations(costs, 2):
        labels = costs[series].keys() & costs[other].keys()
        if len(labels) < 2:
            continue
        _, low, high = mean([costs[series][label] - costs[other][label] for label in sorted(labels)])
        assert low is not None and high is not None, "several numbers have an interval"
        if low > 0 or high < 0:
            better, worse = (series, other) if high < 0 else (other, series)
            ahead[worse].add(better)
            behind[better].add(worse)
    order = sorted(costs, key=lambda series: fmean(costs[series].values()))
    return [
        Rank(
            series,
            rank,
            1 + len(ahead[series]),
            len(order) - len(behind[series]),
            [other for other in order if other not in ahead[series] | behind[series] | {series}],
        )
        for rank, series in enumerate(order, 1)
    ]


def untold(experiment: Experiment) -> str:
    """A sentence with the pairs that are not told apart, each pair once."""
    pairs, seen = [], set[str]()
    for rank in ranks(experiment):
        seen.add(rank.series)
        if others := [other for other in rank.alike if other not in seen]:
            pairs.append(f"{rank.series} from {', '.join(others)}")
    return f"Not told apart: {'; '.join(pairs)}." if pairs else "Each is told from all others."


def _costs(points: list[FigurePoint], sign: float) -> dict[str, float]:
    """By the label of a point, which is a seed: a number of which less is better."""
    return {point.text: sign * point.y.value for point in points}
