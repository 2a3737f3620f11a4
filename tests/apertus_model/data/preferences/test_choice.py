from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apertus_model.data.preferences.choice import (
    Candidate,
    NoPair,
    Pair,
    choose,
    choose_further,
    quantiles,
    random_of,
)


def _candidates(offline: list[float], sampled: list[float]) -> list[Candidate]:
    """Completions named o0, o1, ... and s0, s1, ... with these rewards."""
    return [
        Candidate(f"{origin[0]}{index}", (ord(origin[0]), index), reward, quantile, origin)
        for origin, rewards in (("offline", offline), ("sampled", sampled))
        for index, (reward, quantile) in enumerate(zip(rewards, quantiles(rewards, sampled), strict=True))
    ]


def _choose(offline: list[float], sampled: list[float], worst: float = 0.2, seed: int = 0) -> Pair:
    candidates = _candidates(offline, sampled)
    return choose(candidates, Random(seed), reference=len(sampled), worst_quantile=worst)


def _pairs(offline: list[float], sampled: list[float], worst: float = 0.2) -> set[tuple[str, str]]:
    """All pairs that some order of the completions gives."""
    pairs = (_choose(offline, sampled, worst, seed) for seed in range(60))
    return {(chosen.text, rejected.text) for chosen, rejected in pairs}


def test_a_quantile_is_the_share_of_reference_rewards_that_are_no_larger() -> None:
    assert quantiles([0, 1, 1.5, 3, 9], [1, 2, 3, 3]) == [0, 0.25, 0.25, 1, 1]


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=12), st.lists(st.integers(-4, 4), max_size=6))
def test_quantiles_follow_the_definition(reference: list[int], rewards: list[int]) -> None:
    expected = [sum(other <= reward for other in reference) / len(reference) for reward in rewards]
    assert quantiles(rewards, reference) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("offline", "sampled", "expected"),
    [
        # o1 and s4 are no worse than all reference rewards; the best of the worst is s0, not o0.
        ([0, 9], [1, 2, 3, 4, 5], {("o1", "s0"), ("s4", "s0")}),
        ([3], [1, 2, 3, 4, 5], {("s4", "s0")}),
        # o0 has the quantile of s0, one of five.
        ([1.5], [1, 2, 3, 4, 5], {("s4", "s0"), ("s4", "o0")}),
        # 1/n is above worst_quantile: what is no better than the lower of two reference rewards is among the
        # worst.
        ([], [2, 1], {("s0", "s1")}),
        ([0], [2, 1], {("s0", "s1")}),
        # All of the model's own tie; something better came along: all are among the best, and the better one
        # is chosen, also where it is second.
        ([2], [1, 1], {("o0", "s0"), ("o0", "s1")}),
        # Something worse came along.
        ([0], [1, 1], {("s0", "o0"), ("s1", "o0")}),
    ],
)
def test_the_best_is_paired_with_the_first_of_the_worst(
    offline: list[float], sampled: list[float], expected: set[tuple[str, str]]
) -> None:
    assert _pairs(offline, sampled) == expected


def test_middle_class_replaces_a_missing_best_or_worst() -> None:
    # The extreme ones of the model's own are too long to be candidates: only the middle is left.
    middle = [one for one in _candidates([3], [1, 2, 3, 4, 5]) if one.text in ("o0", "s1", "s3")]
    chosen, rejected = choose(middle, Random(0), reference=5, worst_quantile=0.2)
    assert (chosen.text, rejected.text) == ("s3", "o0")
    chosen, rejected = choose([middle[1], middle[2]], Random(0), reference=5, worst_quantile=0.2)
    assert (chosen.text, rejected.text) == ("s3", "s1")


def test_worst_quantile_widens_the_worst() -> None:
    assert _pairs([2.5], [1, 2, 3, 4, 5], worst=0.2) == {("s4", "s0")}
    assert _pairs([2.5], [1, 2, 3, 4, 5], worst=0.4) == {("s4", "o0"), ("s4", "s1")}


@pytest.mark.parametrize(
    ("offline", "sampled", "reason"),
    [([1, 2], [3], "few_reference_rewards"), ([], [1, 1], "equal_rewards"), ([1], [1, 1], "equal_rewards")],
)
def test_a_prompt_without_a_pair_has_a_reason(
    offline: list[float], sampled: list[float], reason: str
) -> None:
    with pytest.raises(NoPair, match=reason):
        _choose(offline, sampled)


def test_equal_completions_are_one() -> None:
    twice = [Candidate("a", (1,), 1.0, 0.5, "sampled"), Candidate("a", (1,), 2.0, 1.0, "sampled")]
    with pytest.raises(NoPair, match="few_different_completions"):
        choose(twice, Random(0), reference=2, worst_quantile=0.2)


@given(
    st.lists(st.integers(0, 4), max_size=4),
    st.lists(st.integers(0, 4), min_size=2, max_size=8),
    st.floats(0, 1),
    st.integers(0, 100),
)
def test_the_chosen_one_is_always_better(
    offline: list[int], sampled: list[int], worst: float, seed: int
) -> None:
    try:
        chosen, rejected = _choose(list(offline), list(sampled), worst, seed)
    except NoPair:
        assert len({*offline, *sampled}) == 1
        return
    assert chosen.reward > rejected.reward
    assert chosen.tokens != rejected.tokens


def test_second_pair_comes_from_both_halves_without_repetition() -> None:
    candidates = _candidates([0, 9], [1, 2, 3, 4, 5, 6])
    first = choose(candidates, Random(1), reference=6, worst_quantile=0.2)
    left = [one for one in candidates if one not in first]
    seen = set()
    for seed in range(200):
        chosen, rejected = choose_further(candidates, first, Random(seed))
        assert chosen.quantile >= 0.5 > rejected.quantile
        assert not {chosen, rejected} & set(first)
        seen.add((chosen, rejected))
    halves = [[one for one in left if (one.quantile >= 0.5) == upper] for upper in (True, False)]
    assert seen == {(upper, lower) for upper in halves[0] for lower in halves[1]}
    with pytest.raises(NoPair, match="no_further_pair"):
        choose_further(list(first), first, Random(1))


def test_second_pair_comes_from_one_half_when_the_other_has_none() -> None:
    candidates = _candidates([], [1, 2, 3, 4])  # of quantiles 0.25, 0.5, 0.75, 1
    first = (candidates[0], candidates[1])
    assert choose_further(candidates, first, Random(0)) == (candidates[3], candidates[2])
    first = (candidates[3], candidates[2])
    with pytest.raises(NoPair, match="no_further_pair"):
        choose_further(candidates[1:], first, Random(0))


def test_random_numbers_are_those_of_the_seed_and_the_prompt() -> None:
    drawn = [random_of(seed, prompt).random() for seed, prompt in ((1, "a"), (1, "b"), (2, "a"), (1, "a"))]
    assert len(set(drawn)) == 3 and drawn[0] == drawn[3]


Branch = tuple[int, float, float]
"""(number of the generator, or -1 of the model's own; reward; quantile)"""


def _published(branches: list[Branch], random: Random) -> tuple[Branch, Branch]:
    """The first pair as swiss-ai/posttraining picks it: shuffle, sort by quantile with the highest first,
    split at 1 and at 0.2 (ten references), and take the first of best, middle, worst and the first of worst,
    middle, best."""
    order = random.sample(branches, len(branches))
    order.sort(key=lambda branch: branch[2], reverse=True)
    queues = {"best": [], "middle": [], "worst": []}
    for branch in order:
        queues["best" if branch[2] >= 1 else "middle" if branch[2] > 0.2 else "worst"].append(branch)
    pair = []
    for names in (("best", "middle", "worst"), ("worst", "middle", "best")):
        pair.append(next(queues[name] for name in names if queues[name]).pop(0))
    return pair[0], pair[1]


def _ours(branches: list[Branch], random: Random) -> tuple[Branch, Branch]:
    named = {(index,): branch for index, branch in enumerate(branches)}
    candidates = [
        Candidate("", tokens, reward, quantile, "sampled" if generator < 0 else "offline")
        for tokens, (generator, reward, quantile) in named.items()
    ]
    chosen, rejected = choose(candidates, random, reference=10, worst_quantile=0.2)
    return named[chosen.tokens], named[rejected.tokens]


def test_choices_are_distributed_as_those_of_the_published_function() -> None:
    """Eleven generators whose rewards are from N(1, 1), ten completions of the model itself from N(0, 1)."""
    prompts = 4_000
    rng = np.random.default_rng(0)
    rewards = np.concatenate([rng.normal(1, 1, (prompts, 11)), rng.normal(0, 1, (prompts, 10))], axis=1)
    shares = (rewards[:, :, None] >= rewards[:, None, 11:]).mean(axis=2)

    def chosen_by(
        rule: Callable[[list[Branch], Random], tuple[Branch, Branch]], seed: int
    ) -> list[tuple[Branch, Branch]]:
        random = Random(seed)
        return [
            rule(
                [
                    (index if index < 11 else -1, float(r), float(q))
                    for index, (r, q) in enumerate(zip(row, share, strict=True))
                ],
                random,
            )
            for row, share in zip(rewards, shares, strict=True)
        ]

    expected, found = chosen_by(_published, 1), chosen_by(_ours, 2)
    for side in (0, 1):
        counts = [Counter(pair[side][0] for pair in pairs) for pairs in (expected, found)]
        for generator in range(-1, 11):
            shares_of = [count[generator] / prompts for count in counts]
            deviation = np.sqrt(sum(share * (1 - share) for share in shares_of) / prompts)
            assert abs(shares_of[0] - shares_of[1]) < 4 * deviation, (side, generator, shares_of)
        means = [np.mean([pair[side][2] for pair in pairs]) for pairs in (expected, found)]
        assert means[0] == pytest.approx(means[1], abs=1e-12)  # who ties is drawn, its quantile is not
    assert all(
        mine[side][2] == theirs[side][2]
        for mine, theirs in zip(found, expected, strict=True)
        for side in (0, 1)
    )
