"""Agreement of a reward with the labels of pairs, and biases that the labels do not explain.

Invariant: every figure is a mean over pairs, with the interval of the bootstrap over these pairs. A figure to
which no pair contributes is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from apertus_model.evaluation.paired import interval
from specs.stages.evaluate_reward import OF_SOURCE


@dataclass(frozen=True)
class JudgedPair:
    """A labelled pair and the rewards of its completions."""

    source: str
    chosen: float  # reward of the completion that the label prefers
    rejected: float
    longer: int  # characters of the chosen completion less those of the rejected one
    # probabilities that the completion shown first is better: with the chosen one first, then with the
    # rejected one first
    first: tuple[float, float] | None = None

    @property
    def agrees(self) -> float:
        """1 if the reward prefers the chosen completion, 1/2 if the rewards are equal, else 0."""
        return _prefers(self.chosen, self.rejected)


def agreement(pairs: Sequence[JudgedPair], seed: int) -> dict[str, float]:
    """The metrics of `specs.stages.evaluate_reward`, except those of the mass outside the scale. `seed`: of
    the bootstrap."""
    found: dict[str, list[float]] = {
        "accuracy": [pair.agrees for pair in pairs],
        "ties": [float(pair.chosen == pair.rejected) for pair in pairs],
        "accuracy/longer": [pair.agrees for pair in pairs if pair.longer > 0],
        "accuracy/shorter": [pair.agrees for pair in pairs if pair.longer < 0],
        "length_bias": [_for_longer(pair) for pair in pairs if pair.longer],
    }
    for name in dict.fromkeys(pair.source for pair in pairs):
        found[f"{OF_SOURCE}{name}"] = [pair.agrees for pair in pairs if pair.source == name]
    compared = [pair.first for pair in pairs if pair.first is not None]
    # p(chosen) is `first` where the chosen completion is shown first, and 1 - `second` where it is not
    found["accuracy/compared"] = [_prefers(first, second) for first, second in compared]
    found["order_bias"] = [(first + second) / 2 - 0.5 for first, second in compared]
    found["order_consistency"] = [float((first - 0.5) * (0.5 - second) > 0) for first, second in compared]
    metrics = {"pairs": float(len(pairs))}
    for name, values in found.items():
        if values:
            array = np.asarray(values, np.float64)
            low, high = interval(array, seed=seed)
            metrics |= {name: float(array.mean()), f"{name}/low": low, f"{name}/high": high}
    return metrics


def _prefers(one: float, other: float) -> float:
    return 0.5 if one == other else float(one > other)


def _for_longer(pair: JudgedPair) -> float:
    """The reward's preference for the longer completion, minus the label's."""
    return pair.agrees - 1 if pair.longer > 0 else 1 - pair.agrees
