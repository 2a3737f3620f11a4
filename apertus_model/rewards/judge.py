"""A judge as a reward (`specs.judge`): questions about completions, and scores from probabilities of answers.

Invariants: an answer belongs to a key, which is a hash of the answering model, the text of the question and
its possible answers. An answer that is stored under its key is not asked for again.
"""

import hashlib
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple, Protocol

from apertus_model.rewards.base import RewardError, Scored, plain
from apertus_model.rewards.stored_answers import StoredAnswers
from specs.base import canonical_json
from specs.judge import FIELD
from specs.judge import Judge as JudgeSpec

SIDES = ("A", "B")


class JudgedAnswer(NamedTuple):
    """A judge's answer about one completion, or about two in their order."""

    key: str
    about: tuple[int, ...]  # indices among the completions of the prompt
    probabilities: tuple[float, ...]  # of the numbers of the scale, or of A and B

    @property
    def outside(self) -> float:
        """The probability of everything that is not an answer."""
        return max(0.0, 1.0 - sum(self.probabilities))


class AskedModel(Protocol):
    """A model that a judge asks."""

    def ask(self, questions: Sequence[str], answers: Sequence[str]) -> list[list[float]]:
        """p(answer) for each question and answer, over all tokens of the vocabulary. RewardError for answers
        that are not single tokens of the model, or a model without log-probabilities."""


def filled(template: str, values: Mapping[str, str]) -> str:
    """The template with its fields replaced, once: braces in the values stay as they are."""
    return FIELD.sub(lambda field: values[field[1]], template)


def expectation(numbers: Sequence[int], probabilities: Sequence[float]) -> float:
    """sum(k p(k)) / sum(p(k)). RewardError where all p(k) are 0."""
    if not (total := sum(probabilities)) > 0:
        raise RewardError(f"the judge gives no probability to any number from {numbers[0]} to {numbers[-1]}")
    return sum(number * p for number, p in zip(numbers, probabilities, strict=True)) / total


def question(spec: JudgeSpec, constitution: str, prompt: str, completion: str) -> str:
    """The question for the score of a completion."""
    lowest, highest = map(str, spec.scale)
    values = {"constitution": constitution, "prompt": prompt, "completion": completion}
    return filled(spec.template, values | {"lowest": lowest, "highest": highest})


def beginnings(spec: JudgeSpec, constitution: str) -> tuple[str, str]:
    """Two questions whose common beginning is that of all questions for a score."""
    return question(spec, constitution, "One", "One"), question(spec, constitution, "two", "two")


class Judge:
    """Scores of completions, with the answers that they were computed from. `identity`: of the model, in the
    keys of answers; `known`: answers that were given before."""

    def __init__(
        self, spec: JudgeSpec, constitution: str, model: AskedModel, identity: str, known: StoredAnswers
    ) -> None:
        self._spec, self._constitution, self._model = spec, constitution, model
        self._identity, self._known = identity, known
        self.answers: list[JudgedAnswer] = []  # about the completions that were scored last
        self.asked = 0  # questions that the model answered so far

    def score(self, items: Sequence[Scored]) -> list[float]:
        """The expected number for each completion, the lowest for an empty one. With `pairwise`, the scores
        of the best completions are redistributed among them."""
        self.answers = []
        scores = [float(self._spec.scale[0])] * len(items)
        numbers = self._spec.numbers
        questions = [
            ((index,), question(self._spec, self._constitution, conversation(item), item.completion))
            for index, item in enumerate(items)
            if item.completion.strip()
        ]
        for answer in self._ask(questions, tuple(map(str, numbers))):
            scores[answer.about[0]] = expectation(numbers, answer.probabilities)
        return self._compared(items, scores) if self._spec.pairwise is not None else scores

    def _compared(self, items: Sequence[Scored], scores: list[float]) -> list[float]:
        """The scores, those of the best completions redistributed in the order of their mean probability of
        being preferred to another of the best. Equal completions are compared once, and keep equal scores."""
        pairwise = self._spec.pairwise
        assert pairwise is not None, "checked by the caller"
        alike: dict[str, list[int]] = {}
        for index, item in enumerate(items):
            if item.completion.strip():
                alike.setdefault(item.completion, []).append(index)
        firsts = sorted((same[0] for same in alike.values()), key=lambda index: -scores[index])
        best = firsts[: pairwise.best]
        orders = [order for pair in combinations(sorted(best), 2) for order in (pair, pair[::-1])]
        asked = [(order, self._comparison(items, *order)) for order in orders]
        wins = dict.fromkeys(best, 0.0)
        for answer in self._ask(asked, SIDES):
            first, second = answer.about
            if not (total := sum(answer.probabilities)) > 0:
                raise RewardError(f"the judge gives no probability to {' or '.join(SIDES)}")
            preferred = answer.probabilities[0] / total
            wins[first] += preferred
            wins[second] += 1 - preferred
        ranked = sorted(best, key=lambda index: -wins[index])
        redistributed = list(scores)
        for index, place in zip(ranked, best, strict=True):
            for same in alike[items[index].completion]:
                redistributed[same] = scores[place]
        return redistributed

    def _comparison(self, items: Sequence[Scored], first: int, second: int) -> str:
        assert self._spec.pairwise is not None, "checked by the caller"
        values = {"constitution": self._constitution, "prompt": conversation(items[first])}
        sides = {"first": items[first].completion, "second": items[second].completion}
        return filled(self._spec.pairwise.template, values | sides)

    def _ask(
        self, questions: Sequence[tuple[tuple[int, ...], str]], answers: tuple[str, ...]
    ) -> list[JudgedAnswer]:
        """The answers to questions. The model is asked only for the answers that are not known."""
        keys = [self._key(text, answers) for _, text in questions]
        probabilities = {key: known for key in keys if (known := self._known.get(key)) is not None}
        missing = {
            key: text for key, (_, text) in zip(keys, questions, strict=True) if key not in probabilities
        }
        replies = self._model.ask(list(missing.values()), answers) if missing else []
        self.asked += len(missing)
        probabilities |= {key: tuple(reply) for key, reply in zip(missing, replies, strict=True)}
        given = [
            JudgedAnswer(key, about, probabilities[key])
            for key, (about, _) in zip(keys, questions, strict=True)
        ]
        self.answers += given
        return given

    def _key(self, text: str, answers: tuple[str, ...]) -> str:
        question = canonical_json([self._identity, text, list(answers)])
        return hashlib.blake2b(question.encode(), digest_size=16, person=b"apertus-judge").hexdigest()


def conversation(item: Scored) -> str:
    """The prompt as text: a single message of the user as it is, several messages with their roles."""
    texts = [plain(message["content"]) for message in item.messages]
    if len(texts) == 1:
        return texts[0]
    turns = zip(item.messages, texts, strict=True)
    return "\n\n".join(f"{str(message['role']).capitalize()}: {text}" for message, text in turns)
