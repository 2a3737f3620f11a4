"""Scores of a judge whose probabilities are known."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import pytest

from apertus_model.rewards import RewardError, Scored
from apertus_model.rewards.judge import Judge, beginnings, conversation, expectation, filled
from specs.judge import Judge as JudgeSpec

CONSTITUTION = "1. Be kind.\n2. Be brief."


class Scripted:
    """A model whose probabilities follow from the question by a hash, or are given by a text in it."""

    def __init__(self, known: dict[str, list[float]] | None = None) -> None:
        self.known, self.questions = known or {}, list[str]()

    def ask(self, questions: Sequence[str], answers: Sequence[str]) -> list[list[float]]:
        self.questions += questions
        return [self.probabilities(question, len(answers)) for question in questions]

    def probabilities(self, question: str, count: int) -> list[float]:
        for text, values in self.known.items():
            if text in question:
                return values
        digest = hashlib.sha256(question.encode()).digest()
        return [(1 + digest[index]) / 5000 for index in range(count)]


class Nothing:
    def get(self, key: str) -> tuple[float, ...] | None:
        return None


def judge(model: Scripted, known: object = None, **more: object) -> Judge:
    spec = JudgeSpec.model_validate({"from": "sft", "constitution": "c.txt", **more})
    return Judge(spec, CONSTITUTION, model, "theirs", known or Nothing())  # type: ignore[arg-type]


def items(*texts: str) -> list[Scored]:
    return [Scored([{"role": "user", "content": "Why {prompt}?"}], text) for text in texts]


def test_the_score_is_the_expectation_over_the_scale() -> None:
    """sum(k p(k)) / sum(p(k)), of which half of the mass is outside."""
    model = Scripted(
        {"splendid": [0, 0, 0, 0, 0, 0, 0, 0.1, 0.4], "awful": [0.2, 0.2, 0, 0, 0, 0.1, 0, 0, 0]}
    )
    asked = judge(model)
    assert asked.score(items("splendid", "awful")) == pytest.approx(
        [(8 * 0.1 + 9 * 0.4) / 0.5, (0.6 + 0.6) / 0.5]
    )
    assert [answer.outside for answer in asked.answers] == pytest.approx([0.5, 0.5])
    assert [answer.about for answer in asked.answers] == [(0,), (1,)]


def test_a_scale_has_its_own_numbers() -> None:
    assert judge(Scripted({"splendid": [0.1, 0.3]}), scale=[0, 1]).score(items("splendid")) == pytest.approx(
        [0.75]
    )


def test_an_answer_without_any_number_is_an_error() -> None:
    with pytest.raises(RewardError, match="no probability to any number from 1 to 3"):
        expectation([1, 2, 3], [0.0, 0.0, 0.0])


def test_a_comparison_that_prefers_neither_is_an_error() -> None:
    model = Scripted({"A=": [0.0, 0.0]})
    asked = judge(model, pairwise={"best": 2, "template": "{constitution} {prompt} A={first} B={second}"})
    with pytest.raises(RewardError, match=r"^the judge gives no probability to A or B$"):
        asked.score(items("a", "b"))


def test_the_question_has_the_whole_constitution_the_prompt_and_the_completion_as_they_are() -> None:
    model = Scripted()
    judge(model, template="{constitution}|{prompt}|{completion}|{lowest}-{highest}").score(items("{prompt}"))
    assert model.questions == [f"{CONSTITUTION}|Why {{prompt}}?|{{prompt}}|1-9"]


def test_several_messages_are_shown_with_their_roles() -> None:
    turns = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": [{"type": "response", "text": "Hi"}]},
        {"role": "user", "content": "Why?"},
    ]
    assert conversation(Scored(turns, "x")) == "User: Hello\n\nAssistant: Hi\n\nUser: Why?"


def test_an_empty_completion_has_the_lowest_score_and_is_not_asked_about() -> None:
    model = Scripted({"splendid": [0, 0, 1]})
    asked = judge(model, scale=[2, 4], pairwise={"best": 3})
    assert asked.score(items("", "splendid", " \n")) == [2.0, 4.0, 2.0]
    assert len(model.questions) == 1


def test_what_all_questions_have_in_common_begins_two_of_them() -> None:
    spec = JudgeSpec.model_validate({"from": "sft", "constitution": "c.txt"})
    first, second = beginnings(spec, CONSTITUTION)
    asked = judge(model := Scripted())
    asked.score(items("an answer"))
    shared = first[: next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)]
    assert CONSTITUTION in shared
    assert model.questions[0].startswith(shared)


def test_the_best_are_compared_in_both_orders_and_change_their_scores() -> None:
    """Three of four: a, b and c with scores 9, 8 and 7. b always wins, c beats a when it is shown first."""
    pairs = {
        "A=a B=b": [0.1, 0.3], "A=b B=a": [0.4, 0.1],  # b: (0.75 + 0.8) / 2
        "A=a B=c": [0.2, 0.2], "A=c B=a": [0.3, 0.1],  # c: (0.5 + 0.75) / 2
        "A=b B=c": [0.5, 0.0], "A=c B=b": [0.0, 0.5],  # b: 1
    }  # fmt: skip
    numbers = {
        name: [float(k == score) for k in range(1, 10)]
        for name, score in zip("abcd", (9, 8, 7, 1), strict=True)
    }
    model = Scripted(pairs | {f"text={name}": values for name, values in numbers.items()})
    asked = judge(
        model,
        template="{constitution} {prompt} text={completion}",
        pairwise={"best": 3, "template": "{constitution} {prompt} A={first} B={second}"},
    )
    assert asked.score(items("a", "b", "c", "d")) == [7.0, 9.0, 8.0, 1.0]
    assert len(model.questions) == 4 + 6
    assert [one.about for one in asked.answers[4:]] == [(0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1)]


def test_equal_completions_have_equal_scores_and_are_compared_once() -> None:
    model = Scripted()
    scores = judge(model, pairwise={"best": 3}).score(items("a", "b", "a", "c"))
    assert scores[0] == scores[2]
    assert len(model.questions) == 3 + 6


def test_what_is_known_is_not_asked_for() -> None:
    model = Scripted()
    first = judge(model, pairwise={"best": 2})
    scores = first.score(items("a", "b"))
    told = {answer.key: answer.probabilities for answer in first.answers}
    again = judge(Scripted({"": [float("nan")] * 9}), told, pairwise={"best": 2})
    assert again.score(items("a", "b")) == scores
    assert (first.asked, again.asked) == (4, 0)


@pytest.mark.parametrize(
    "change",
    [{"template": "{constitution} {prompt} {completion}?"}, {"scale": [1, 5]}],
)
def test_another_question_or_scale_has_other_keys(change: dict[str, object]) -> None:
    plain, other = judge(Scripted()), judge(Scripted(), **change)
    for one in (plain, other):
        one.score(items("a"))
    assert plain.answers[0].key != other.answers[0].key


def test_fields_are_filled_once() -> None:
    assert filled("{a} {b} {a}", {"a": "{b}", "b": "x"}) == "{b} x {b}"
