"""Agreement of rewards with labels, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from apertus_model.stages.evaluate_reward import JudgedPair, agreement

# two pairs whose chosen completion is longer, one with a shorter one, one of equal lengths
PAIRS = [
    JudgedPair("a", chosen=3, rejected=1, longer=5, first=(0.9, 0.3)),
    JudgedPair("a", chosen=1, rejected=2, longer=2, first=(0.6, 0.7)),
    JudgedPair("b", chosen=1, rejected=4, longer=-3, first=(0.2, 0.9)),
    JudgedPair("b", chosen=2, rejected=2, longer=0, first=(0.5, 0.4)),
]


def test_every_figure_is_a_mean_over_its_pairs() -> None:
    found = agreement(PAIRS, seed=0)
    assert {name: value for name, value in found.items() if not name.endswith(("/low", "/high"))} == {
        "pairs": 4,
        "accuracy": (1 + 0 + 0 + 0.5) / 4,
        "ties": 1 / 4,
        "accuracy/longer": 1 / 2,
        "accuracy/shorter": 0,
        # the reward prefers the longer one in the first and the third pair, the labels in the first two
        "length_bias": pytest.approx(2 / 3 - 2 / 3),
        "accuracy/source/a": 1 / 2,
        "accuracy/source/b": 1 / 4,
        # shares of the chosen completion: (0.9 + 0.7) / 2, (0.6 + 0.3) / 2, (0.2 + 0.1) / 2, (0.5 + 0.6) / 2
        "accuracy/compared": 2 / 4,
        "order_bias": pytest.approx(((0.9 + 0.3) + (0.6 + 0.7) + (0.2 + 0.9) + (0.5 + 0.4)) / 8 - 0.5),
        "order_consistency": 2 / 4,
    }


def test_a_reward_that_likes_length_has_a_bias_that_the_labels_do_not_have() -> None:
    longer = [3, -2, 4, -1, 5, -5]
    pairs = [JudgedPair("a", chosen=float(one > 0), rejected=float(one < 0), longer=one) for one in longer]
    found = agreement(pairs, seed=0)
    assert (found["length_bias"], found["accuracy/longer"], found["accuracy/shorter"]) == (0.5, 1.0, 0.0)
    opposite = [
        JudgedPair("a", chosen=pair.rejected, rejected=pair.chosen, longer=pair.longer) for pair in pairs
    ]
    assert agreement(opposite, seed=0)["length_bias"] == -0.5


def test_intervals_are_those_of_the_bootstrap_over_pairs() -> None:
    random = np.random.default_rng(3)
    right = random.random(400) < 0.7
    pairs = [JudgedPair("a", chosen=float(one), rejected=0.5, longer=1) for one in right]
    found = agreement(pairs, seed=0)
    share = right.mean()
    error = 1.96 * np.sqrt(share * (1 - share) / 400)
    assert found["accuracy/low"] == pytest.approx(share - error, abs=0.006)
    assert found["accuracy/high"] == pytest.approx(share + error, abs=0.006)


def test_metrics_without_pairs_are_left_out() -> None:
    found = agreement([JudgedPair("a", chosen=1, rejected=0, longer=0)], seed=0)
    assert {name.split("/")[0] for name in found} == {"pairs", "accuracy", "ties"}
    assert "accuracy/longer" not in found
