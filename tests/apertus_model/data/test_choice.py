from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apertus_model.data.choice import Candidate, NoPair, choose, choose_further, quantiles


def _candidates(offline: list[float], sampled: list[float]) -> list[Candidate]:
    """Completions named o0, o1, ... and s0, s1, ... with these rewards."""
    return [
        Candidate(f"{origin[0]}{index}", (ord(origin[0]), index), reward, quantile, origin)
        for origin, rewards in (("offline", offline), ("sampled", sampled))
        for index, (reward, quantile) in enumerate(zip(rewards, quantiles(rewards, sampled), strict=True))
    ]


def _chosen(offline: list[float], sampled: list[float], worst: float = 0.2) -> tuple[str, str]:
    chosen, rejected = choose(_candidates(offline, sampled), reference=len(sampled), worst_quantile=worst)
    return chosen.text, rejected.text


def test_a_quantile_is_the_share_of_reference_rewards_that_are_no_larger() -> None:
    assert quantiles([0, 1, 1.5, 3, 9], [1, 2, 3, 3]) == [0, 0.25, 0.25, 1, 1]


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=12), st.lists(st.integers(-4, 4), max_size=6))
def test_quantiles_follow_the_definition(reference: list[int], rewards: list[int]) -> None:
    expected = [sum(other <= reward for other in reference) / len(reference) for reward in rewards]
    assert quantiles(rewards, reference) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("offline", "sampled", "expected"),
    [
        # Offline completions come first in a class: o1 is above all reference rewards, o0 is below all.
        ([0, 9], [1, 2, 3, 4, 5], ("o1", "o0")),
        # Nothing offline is among the best or the worst: the model's own are.
        ([3], [1, 2, 3, 4, 5], ("s4", "s0")),
        # The first of several in stored order, not the extreme one.
        ([7, 9], [5, 1, 0, 3, 4], ("o0", "s2")),
        # 1/n is above worst_quantile: what is no better than the lower of two reference rewards is among the
        # worst.
        ([], [2, 1], ("s0", "s1")),
        ([1.5, 0], [2, 1], ("s0", "o0")),
        # All of the model's own tie; something better came along: both are among the best, the better one is
        # chosen.
        ([2], [1, 1, 1], ("o0", "s0")),
        ([1, 2], [1, 1, 1], ("o1", "o0")),
        # Something worse came along.
        ([0], [1, 1, 1], ("s0", "o0")),
    ],
)
def test_the_best_is_paired_with_one_of_the_worst(
    offline: list[float], sampled: list[float], expected: tuple[str, str]
) -> None:
    assert _chosen(offline, sampled) == expected


def test_middle_class_replaces_a_missing_best_or_worst() -> None:
    # The extreme ones of the model's own are too long to be candidates: only the middle is left.
    middle = [one for one in _candidates([3], [1, 2, 3, 4, 5]) if one.text in ("o0", "s1", "s3")]
    chosen, rejected = choose(middle, reference=5, worst_quantile=0.2)
    assert (chosen.text, rejected.text) == ("o0", "s1")
    chosen, rejected = choose(middle[1:], reference=5, worst_quantile=0.2)
    assert (chosen.text, rejected.text) == ("s3", "s1")


def test_worst_quantile_widens_the_worst() -> None:
    assert _chosen([2.5], [1, 2, 3, 4, 5], worst=0.2) == ("s4", "s0")
    assert _chosen([2.5], [1, 2, 3, 4, 5], worst=0.4) == ("s4", "o0")


@pytest.mark.parametrize(
    ("offline", "sampled", "reason"),
    [([1, 2], [3], "few_reference_rewards"), ([], [1, 1], "equal_rewards"), ([1], [1, 1], "equal_rewards")],
)
def test_a_prompt_without_a_pair_has_a_reason(
    offline: list[float], sampled: list[float], reason: str
) -> None:
    with pytest.raises(NoPair, match=reason):
        _chosen(offline, sampled)


def test_equal_completions_are_one() -> None:
    twice = [Candidate("a", (1,), 1.0, 0.5, "sampled"), Candidate("a", (1,), 2.0, 1.0, "sampled")]
    with pytest.raises(NoPair, match="few_different_completions"):
        choose(twice, reference=2, worst_quantile=0.2)


@given(
    st.lists(st.integers(0, 4), max_size=4),
    st.lists(st.integers(0, 4), min_size=2, max_size=8),
    st.floats(0, 1),
)
def test_the_chosen_one_is_always_better(offline: list[int], sampled: list[int], worst: float) -> None:
    candidates = _candidates(list(offline), list(sampled))
    try:
        chosen, rejected = choose(candidates, reference=len(sampled), worst_quantile=worst)
    except NoPair:
        assert len({one.reward for one in candidates}) == 1
        return
    assert chosen.reward > rejected.reward
    assert chosen.tokens != rejected.tokens


def test_second_pair_comes_from_both_halves_without_repetition() -> None:
    candidates = _candidates([0, 9], [1, 2, 3, 4, 5, 6])
    first = choose(candidates, reference=6, worst_quantile=0.2)
    seen = set()
    for prompt in map(str, range(200)):
        chosen, rejected = choose_further(candidates, first, seed=1, prompt=prompt)
        assert chosen.quantile >= 0.5 > rejected.quantile
        assert not {chosen, rejected} & set(first)
        assert (chosen, rejected) == choose_further(candidates, first, seed=1, prompt=prompt)
        seen.add((chosen.text, rejected.text))
    assert seen == {(upper, lower) for upper in ("s2", "s3", "s4", "s5") for lower in ("s0", "s1")}
    with pytest.raises(NoPair, match="no_further_pair"):
        choose_further(list(first), first, seed=1, prompt="p")
