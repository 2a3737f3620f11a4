"""Advice on training: what is counted, and the bound of the rotary base."""

from __future__ import annotations

import numpy as np
import pytest

from flows.planning.advice.training import ROPE_BOUNDS, rope_bound
from tests.flows.planning.advising import Advised


def test_warm_up_advice_counts_the_steps_for_which_states_are_kept(advised: Advised) -> None:
    """AdEMAMix goes on through a stage that carries its states: 16 + 6 steps."""
    carried = advised(
        "stages.cooldown.carry=[weights, optimizer]", "stages.cooldown.optimizer={alpha_warmup: 100}"
    )
    (advice,) = [advice for advice in carried["slow-warmup"] if advice["stage"] == "cooldown"]
    assert advice["numbers"] == {
        "steps": 22,
        "alpha_warmup": 100,
        "beta3_warmup": 10,
        "alpha_reached": pytest.approx(8 * 0.22),
    }


@pytest.mark.parametrize(("length", "bound"), ROPE_BOUNDS[:4])
def test_below_the_bound_of_rope_some_distance_has_no_preference_for_similar_tokens(
    length: int, bound: float
) -> None:
    """B(m) = sum_i cos(m base^(-2 i / 128)) of arXiv 2405.14591: positive everywhere near the bound,
    negative somewhere below."""

    def preferred(base: float) -> bool:
        frequencies = base ** (-np.arange(0, 128, 2, dtype=np.float64) / 128)
        return bool((np.cos(np.outer(np.arange(length), frequencies)).sum(1) >= 0).all())

    assert rope_bound(length) == pytest.approx(bound)
    assert any(preferred(bound * factor) for factor in np.linspace(0.82, 1.18, 37))
    assert not any(preferred(bound * factor) for factor in (0.4, 0.5, 0.6, 0.7))
