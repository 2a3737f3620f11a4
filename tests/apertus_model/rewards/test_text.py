from __future__ import annotations

import ast
import statistics
from itertools import combinations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apertus_model.rewards import RewardError, Scored
from apertus_model.rewards.text import WEIGHTS, grounded_answer, reference_overlap

_WORDS = """
list dict value file path return open close read write index
name error count first last item line text byte key
"""
WORDS = _WORDS.split()
sentences = st.lists(st.sampled_from(WORDS), min_size=4, max_size=20, unique=True).map(" ".join)


def _scored(completion: str, answer: str | None = None, finished: bool = True, **metadata: object) -> Scored:
    return Scored([{"role": "user", "content": "?"}], completion, finished, answer, metadata)


def _documented() -> list[tuple[str, str]]:
    """(name, first line of the documentation) of functions of the standard library."""
    found = []
    for module in (statistics, ast):
        for name, function in sorted(vars(module).items()):
            if (
                callable(function)
                and not isinstance(function, type)
                and (function.__doc__ or "").strip()
                and not name.startswith("_")
            ):
                found.append((name, f"`{name}`: {function.__doc__.strip().splitlines()[0]}"))
    return found


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("the cat sat", 1.0),
        ("The CAT, sat!", 1.0),
        ("the cat", (2 * 2 / 5 + 2 * 1 / 3) / 2),  # words: 2 of 2 and of 3; pairs: 1 of 1 and of 2
        ("sat cat the", (1 + 0) / 2),
        ("the the the", (2 * 1 / 6 + 0) / 2),
        ("dog", 0.0),
        ("", 0.0),
    ],
)
def test_overlap_is_the_mean_f1_of_words_and_pairs(completion: str, expected: float) -> None:
    assert reference_overlap(_scored(completion, "the cat sat")) == pytest.approx(expected, abs=1e-12)


def test_a_one_word_reference_is_compared_by_words_alone() -> None:
    assert reference_overlap(_scored("yes", "yes")) == 1.0
    assert reference_overlap(_scored("yes sir", "yes")) == pytest.approx(2 / 3)


def test_overlap_prefers_the_summary_of_the_metadata_to_the_answer() -> None:
    assert reference_overlap(_scored("a b", answer="c d", summary="a b")) == 1.0
    with pytest.raises(RewardError, match="nothing to compare"):
        reference_overlap(_scored("a b"))


@given(sentences, st.text(max_size=200), st.booleans())
def test_rewards_lie_between_0_and_1(answer: str, completion: str, finished: bool) -> None:
    item = _scored(completion, answer, finished, function="m.open")
    assert 0 <= grounded_answer(item) <= 1
    assert 0 <= reference_overlap(item) <= 1


@settings(max_examples=200)
@given(sentences, sentences)
def test_the_documented_answer_is_worth_1_and_one_of_other_words_less(answer: str, other: str) -> None:
    assert grounded_answer(_scored(answer, answer)) == pytest.approx(1.0, abs=1e-12)
    # the same words in another order may have all runs of three characters in common
    if sorted(other.split()) != sorted(answer.split()):
        assert grounded_answer(_scored(other, answer)) < 1 - 1e-6


def test_among_real_functions_the_right_answer_wins() -> None:
    documented = _documented()
    assert len(documented) > 30
    for name, answer in documented:
        own = grounded_answer(_scored(answer, answer, function=f"m.{name}"))
        for _, other in documented:
            if other != answer:
                assert grounded_answer(_scored(other, answer, function=f"m.{name}")) < own - 0.05


def test_silence_repetition_and_running_on_are_worth_less() -> None:
    answer = "Return the sample arithmetic mean of data."
    right = grounded_answer(_scored(answer, answer))
    assert grounded_answer(_scored("", answer)) == 0
    assert grounded_answer(_scored(" \n", answer)) == 0
    assert grounded_answer(_scored("Return Return Return Return Return Return", answer)) < right - 0.4
    assert grounded_answer(_scored(answer, answer, finished=False)) == pytest.approx(
        right - WEIGHTS["finished"]
    )
    assert grounded_answer(_scored(f"{answer} {answer} {answer}", answer)) < right - 0.1


def test_each_part_pulls_in_its_direction() -> None:
    answer = "`mean` is a function of statistics. It returns the arithmetic average."

    def worth(completion: str) -> float:
        return grounded_answer(_scored(completion, answer, function="statistics.mean"))

    assert worth("It returns the average.") > worth("It returns the file.")
    assert worth("It returns the averag.") > worth("It returns the xyzxyz.")
    assert worth("`mean` returns the value.") > worth("`xxxx` returns the value.")


def test_few_random_completions_tie() -> None:
    random = Random(0)
    answer = "Return the first item of the list whose key is the name of the file."
    completions = [" ".join(random.choices(WORDS, k=random.randint(3, 16))) for _ in range(300)]
    values = [
        grounded_answer(_scored(completion, answer, random.random() < 0.5)) for completion in completions
    ]
    pairs = list(combinations(values, 2))
    assert sum(first == second for first, second in pairs) / len(pairs) < 0.002
