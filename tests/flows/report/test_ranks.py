"""Ranks of series over seeds: the pairs that the seeds tell apart, beside the paired test of scipy."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
from scipy.stats import ttest_rel

from flows.report.experiment_charts import draw
from flows.report.experiments import Experiment, experiment_of
from flows.report.ranks import ranks
from specs.figures import FigureSpec

AXIS = {"stage": "e-{variant}", "metric": "m", "better": "lower"}
FIGURE = {"title": "t", "y": AXIS, "mean": True}


def ranked(values: dict[str, list[float]], better: str = "lower") -> Experiment:
    series = {name: f"{name}-*" for name in values}
    axis = AXIS | {"better": better}
    spec = FigureSpec.model_validate(FIGURE | {"y": axis, "series": series, "ranks": True})
    metrics = {
        f"e-{name}-{seed}": {"m": value} for name, own in values.items() for seed, value in enumerate(own)
    }
    return experiment_of(spec, metrics)


@pytest.mark.parametrize("better", ["lower", "higher"])
def test_ranks_are_those_that_a_paired_test_of_each_pair_leaves_open(better: str) -> None:
    draws = random.Random(46)
    sign = 1 if better == "lower" else -1
    for _ in range(20):
        values = {name: [draws.gauss(level, 0.4) for _ in range(3)] for level, name in enumerate("abcdef")}
        found = {rank.series: rank for rank in ranks(ranked(values, better))}
        told = {
            frozenset(pair)
            for pair in combinations(values, 2)
            if ttest_rel(values[pair[0]], values[pair[1]]).pvalue < 0.05
        }
        mean = {name: sign * sum(own) for name, own in values.items()}
        assert [found[name].rank for name in sorted(mean, key=mean.__getitem__)] == [1, 2, 3, 4, 5, 6]
        for name, rank in found.items():
            others = [other for other in values if other != name]
            apart = [other for other in others if {name, other} in told]
            assert rank.best == 1 + sum(mean[other] < mean[name] for other in apart)
            assert rank.worst == 6 - sum(mean[other] > mean[name] for other in apart)
            assert sorted(rank.alike) == [other for other in others if other not in apart]


def test_the_figure_says_which_series_the_seeds_do_not_tell_apart() -> None:
    drawn = draw("loss", ranked({"A": [1.0, 1.1, 0.9], "B": [1.1, 0.9, 1.0], "C": [2.0, 2.1, 1.9]}))
    assert drawn is not None and "Not told apart: A from B." in drawn.summary
    assert [trace["x"][0] for trace in drawn.plot["data"]] == ["A<br>1 (1 to 2)", "B<br>2 (1 to 2)", "C<br>3"]
    single = draw("loss", ranked({"A": [1.0], "B": [2.0]}))
    assert single is not None and "Not told apart: A from B." in single.summary
    apart = draw("loss", ranked({"A": [1.0, 1.1], "B": [2.0, 2.1]}))
    assert apart is not None and "Every series is told apart from all others." in apart.summary


def test_only_seeds_that_all_series_have_are_ranked() -> None:
    """A store may not have all runs yet."""
    found = ranks(ranked({"A": [1.0, 1.1, 1.05], "B": [1.1, 1.21, 1.155, 0.1]}))
    assert [(rank.series, rank.rank, rank.best, rank.worst) for rank in found] == [
        ("A", 1, 1, 1),
        ("B", 2, 2, 2),
    ]
    assert ranks(ranked({"A": [1.0], "B": []})) != [] and ranks(ranked({"A": [], "B": []})) == []


@pytest.mark.parametrize("change", [{"mean": False}, {"against": "A"}, {"x": AXIS}])
def test_a_figure_without_means_of_seeds_has_no_ranks(change: dict[str, object]) -> None:
    figure = FIGURE | {"series": {"A": "a-*"}, "ranks": True} | change
    with pytest.raises(ValueError, match="ranks are for bars with mean: true"):
        FigureSpec.model_validate(figure)
