"""Ranks of the series of a figure whose variants are seeds, and the ranks that the seeds leave open.

Two series are told apart if the 95% interval of their differences, seed by seed, does not contain 0. Each
pair is tested by itself: of twelve equal series, three of the 66 pairs are told apart by chance.
"""

from itertools import combinations
from statistics import fmean
from typing import NamedTuple

from flows.report.experiments import Experiment, by_label, mean


class Rank(NamedTuple):
    """A series with its rank by the mean, 1 for the best; `best` and `worst`: the best and the worst rank
    that the pairs that are told apart allow."""

    series: str
    rank: int
    best: int
    worst: int
    alike: list[str]  # the series that are not told apart from it

    @property
    def shown(self) -> str:
        return str(self.rank) if self.best == self.worst else f"{self.rank} ({self.best} to {self.worst})"


def ranks(experiment: Experiment) -> list[Rank]:
    """The series that have numbers, the best first, by the seeds that all of them have; none without such."""
    sign = -1.0 if experiment.spec.y.better == "higher" else 1.0
    labelled = {series: by_label(points) for series, points in experiment.single.items() if points}
    seeds = set.intersection(*map(set, labelled.values())) if labelled else set[str]()
    costs = {
        series: {seed: sign * fmean(point.y.value for point in own[seed]) for seed in sorted(seeds)}
        for series, own in labelled.items()
        if seeds
    }
    ahead: dict[str, set[str]] = {series: set() for series in costs}
    behind: dict[str, set[str]] = {series: set() for series in costs}
    for series, other in combinations(costs, 2):
        _, low, high = mean([costs[series][seed] - costs[other][seed] for seed in costs[series]])
        if low is not None and high is not None and (low > 0 or high < 0):
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


def not_told_apart(experiment: Experiment) -> str:
    """A sentence with the pairs that are not told apart, each pair once."""
    pairs, seen = [], set[str]()
    for rank in ranks(experiment):
        seen.add(rank.series)
        if others := [other for other in rank.alike if other not in seen]:
            pairs.append(f"{rank.series} from {', '.join(others)}")
    return f"Not told apart: {'; '.join(pairs)}." if pairs else "Every series is told apart from all others."
