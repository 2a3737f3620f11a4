"""Comparison of two models by their scores on the same prompts.

Invariant: the same scores give the same interval, on every machine.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specs.stages.memorisation import with_interval

RESAMPLES = 10_000
LEVEL = 0.95
CHUNK = 2**22  # indices that are drawn at a time


@dataclass(frozen=True)
class PairedComparison:
    """The scores of a first model compared with those of a second one."""

    difference: float  # mean of first - second
    low: float  # 95% confidence interval of the difference
    high: float
    wins: float  # share of prompts where the first scores higher, ties counting half
    count: int  # number of prompts


def compare(
    first: Sequence[float] | NDArray[np.float64], second: Sequence[float] | NDArray[np.float64]
) -> PairedComparison:
    """Compares two models by per-prompt scores, prompt by prompt.

    The interval is that of the paired bootstrap with percentiles (Efron & Tibshirani 1993, "An introduction
    to the bootstrap", chapter 13): prompts are drawn with replacement 10,000 times, and the interval is that
    between the 2.5% and 97.5% quantiles of the mean differences. `first`, `second`: finite scores, (prompts,)
    in the same order; several completions of a prompt are averaged."""
    differences = np.asarray(first, np.float64) - np.asarray(second, np.float64)
    assert len(first) == len(second) and np.isfinite(differences).all()
    low, high = interval(differences)
    wins = float(np.mean((differences > 0) + 0.5 * (differences == 0)))
    return PairedComparison(float(differences.mean()), low, high, wins, int(differences.size))


def interval(values: NDArray[np.float64], *, seed: int = 0) -> tuple[float, float]:
    """The 95% interval of the mean of `values`, (n,), by the bootstrap with percentiles; `seed`: of draws."""
    low, high = np.quantile(bootstrap_means(values, seed=seed), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def mean_with_interval(name: str, values: NDArray[np.float64], *, seed: int = 0) -> dict[str, float]:
    """The mean of `values`, (n,), as a metric, and the bounds of its interval as metrics of their own."""
    metrics = (float(values.mean()), *interval(values, seed=seed))
    return dict(zip(with_interval(name), metrics, strict=True))


def bootstrap_means(
    values: NDArray[np.float64], *, seed: int, resamples: int = RESAMPLES
) -> NDArray[np.float64]:
    """Means of `values` drawn with replacement: (n,) -> (resamples,)."""
    random = np.random.default_rng(seed)
    at_once = max(1, CHUNK // values.size)
    means = []
    for begin in range(0, resamples, at_once):
        size = min(at_once, resamples - begin), values.size
        means.append(values[random.integers(values.size, size=size, dtype=np.int32)].mean(axis=1))
    return np.concatenate(means)
