"""Answers of a model: their rewards beside those of another, what people see of them, and the rows on which
models are compared."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from apertus_model.data.rows import write_rows
from apertus_model.data.tokens.stream import IGNORE_INDEX
from apertus_model.evaluation.answers import (
    Answers,
    answer_rows,
    expected_best,
    most_frequent,
    rewards,
)
from tests.apertus_model.preference_artifacts import attempt_at, put_rows

PAD = 9


def answers(values: list[list[float]] | None, *, finished: tuple[bool, ...] = (True, False)) -> Answers:
    """Two prompts with as many answers as there are values; the second has a documented answer."""
    prompts: list[Any] = [
        {"id": "a", "messages": [{"content": "A?"}], "tokens": [1, 2], "completions": []},
        {"id": "b", "messages": [{"content": "B?"}], "tokens": [3], "completions": [{"text": "stated"}]},
    ]
    completions: list[Any] = [
        {"completions": [{"text": f"{name}.", "tokens": [4, 5], "finished": ended}]}
        for name, ended in zip("ab", finished, strict=True)
    ]
    sampled: list[Any] | None = [{"sampled": row} for row in values] if values is not None else None
    return Answers(prompts, completions, sampled, PAD)


def test_empty_answers_have_no_time(bench: Any) -> None:
    prompts = put_rows(bench, "prompts", "prompts0", [{"id": "a"}], {"pad_id": PAD})
    attempt = attempt_at(bench, "completions", "completions0")
    written = write_rows(attempt, "completions", [{"id": "a", "completions": []}])
    attempt.commit(metrics={"tokens": 0, "tokens_per_second": 0.0}, facts=written)
    assert Answers.read(prompts, attempt.artifact, None).seconds == 0.0


def test_without_rewards_the_answers_are_counted() -> None:
    metrics, table = rewards(answers(None), None, "own", "")
    assert metrics == {"reward/prompts": 2.0, "reward/finished": 0.5}
    assert table == {"model": "own", "against": None, "rows": []}


def test_rewards_are_means_over_the_answers_and_compared_by_prompt() -> None:
    own, other = answers([[1.0, 3.0], [4.0]]), answers([[0.0], [5.0]])
    alone, _ = rewards(own, None, "own", "")
    assert alone["reward/mean"] == 3.0 and "reward/against" not in alone
    metrics, table = rewards(own, other, "own", "base")
    assert (metrics["reward/mean"], metrics["reward/against"], metrics["reward/difference"]) == (
        3.0,
        2.5,
        0.5,
    )
    assert metrics["reward/wins"] == 0.5
    assert metrics["reward/difference/low"] <= 0.5 <= metrics["reward/difference/high"]
    assert table == {
        "model": "own",
        "against": "base",
        "rows": [{"id": "a", "reward": 2.0, "against": 0.0}, {"id": "b", "reward": 4.0, "against": 5.0}],
    }


def test_the_best_of_k_is_the_mean_over_all_choices_of_k() -> None:
    """With rewards of 0 and 1 it is the estimate of pass@k of arXiv 2107.03374: 1 - C(n - c, k) / C(n, k)."""
    values = [0.25, 1.0, 0.0, 0.5, 0.25]
    for k in range(1, 6):
        every = [max(chosen) for chosen in itertools.combinations(values, k)]
        assert expected_best(values, k) == pytest.approx(sum(every) / len(every), rel=1e-12)
        right = expected_best([0.0, 1.0, 1.0, 0.0, 0.0], k)
        assert right == pytest.approx(1 - math.comb(3, k) / math.comb(5, k), rel=1e-12)


def test_the_most_frequent_answer_is_chosen_by_last_lines() -> None:
    assert most_frequent(["a\n7", "b\n8 ", "c\n8"]) == 1
    assert most_frequent(["x", "y", "y", "x"]) == 0


def test_several_answers_have_their_best_and_most_frequent_reward() -> None:
    own = answers([[0.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    for row, texts in zip(own.completions, (["1", "2", "2", "3"], ["4", "4", "4", "5"]), strict=True):
        row["completions"] = [{"text": text, "tokens": [4], "finished": True} for text in texts]
    metrics, _ = rewards(own, None, "own", "", answers=4)
    assert {name: metrics[name] for name in metrics if name.startswith(("reward/best", "reward/maj"))} == {
        "reward/best/1": 0.375,
        "reward/best/2": pytest.approx((5 / 6 + 1 / 2) / 2),
        "reward/best/4": 1.0,
        "reward/majority/1": 0.0,
        "reward/majority/2": 0.0,
        "reward/majority/4": 0.5,
    }


def test_people_see_the_answers_of_both_models_and_the_documented_one() -> None:
    found = answers([[1.0], [4.0]]).shown(2, "own", answers(None), "base")["prompts"]
    assert [(row["id"], row["prompt"]) for row in found] == [("a", "A?"), ("b", "B?")]
    assert found[1]["completions"] == [
        {"model": "own", "text": "b.", "reward": 4.0},
        {"model": "base", "text": "b.", "reward": None},
        {"model": "documented", "text": "stated", "reward": None},
    ]
    assert len(answers(None).shown(1, "own", None, "")["prompts"]) == 1


def test_the_labels_are_the_tokens_of_the_answers() -> None:
    own = answers(None)
    assert own.longest == 4
    (row,) = answer_rows(list(own.sequences()), 8, PAD)
    assert row.input.tolist() == [1, 2, 4, 5, 3, 4, 5, PAD]
    nothing = IGNORE_INDEX
    assert row.labels.tolist() == [nothing, 4, 5, nothing, 4, 5, nothing, nothing]
    assert row.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 0]


def test_an_answer_that_is_longer_than_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="4"):
        answer_rows(list(answers(None).sequences()), 3, PAD)
