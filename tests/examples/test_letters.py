from __future__ import annotations

import io
from collections import Counter
from itertools import pairwise

from apertus_model.data.conversations.stored import Conversation
from apertus_model.rewards.base import Scored
from examples.letters import (
    LETTERS,
    LINES,
    RULE,
    RULES,
    Reader,
    chain,
    chain_questions,
    chains,
    last_line,
    random_of_4,
    random_of_8,
    right_letters,
    rule_of_4,
    rule_of_8,
)
from specs.sources import SourceSpec

SOURCE = SourceSpec.model_validate(
    {"url": "/nowhere", "format": "conversations", "reader": "a.b:c", "version": 1}
)
PYTHON = "\n".join(f'def f{number}():\n    """What {number} is."""' for number in range(200))


def read(reader: Reader) -> list[tuple[list[str], list[str]]]:
    """Prompts and answers, letter by letter."""
    found = []
    for one in reader(io.BytesIO(PYTHON.encode()), SOURCE, "a.py"):
        assert isinstance(one, Conversation)
        prompt, answer = (str(message["content"]).split() for message in one.messages)
        assert one.completions == [str(one.messages[1]["content"])] and one.group == " ".join(prompt)
        found.append((prompt, answer))
    return found


def test_an_answer_follows_the_rule_or_nothing_and_is_as_long_as_its_prompt() -> None:
    assert sorted(RULE) == sorted(RULE.values())
    for length, by_rule, at_random in ((4, rule_of_4, random_of_4), (8, rule_of_8, random_of_8)):
        for prompt, answer in read(by_rule):
            assert len(prompt) == len(answer) == length
            assert answer == [RULE[letter] for letter in [prompt[-1], *answer[:-1]]]
        drawn = read(at_random)
        assert [prompt for prompt, _ in drawn] == [prompt for prompt, _ in read(by_rule)]
        assert len({tuple(prompt) for prompt, _ in drawn}) == 200
        pairs = Counter(
            pair for prompt, answer in drawn for pair in zip([prompt[-1], *answer], answer, strict=False)
        )
        by_chance = sum(count for (letter, to), count in pairs.items() if RULE[letter] == to)
        assert by_chance < 3 * 200 * length / 26


def test_a_chain_follows_one_rule_and_its_last_line_is_verified() -> None:
    documents = [*chains(io.BytesIO(PYTHON.encode()), SOURCE, "a.py")]
    for (prompt, answer), document in zip(read(chain_questions), documents, strict=True):
        assert isinstance(document, str) and document.split() == prompt + answer
        rule, letters = RULES[prompt[0]], [prompt[-1], *(one for one in answer if one.islower())]
        assert all(rule[letter] == to for letter, to in pairwise(letters))
    text = chain(["1", "a"])
    lines = text.splitlines()
    assert [(line[0], len(line.split())) for line in lines] == [(name, 1 + LETTERS) for name in LINES]
    other = "\n".join([*lines[:-1], chain(["1", "b"]).splitlines()[-1]])
    items = [Scored([], written, answer=text) for written in (text, f"{lines[-1]} ", other, "")]
    assert last_line(items) == [1, 1, 0, 0]


def test_letters_are_right_at_their_places() -> None:
    written = ("a b c d", "a b", "b a c d", " a x c d e f", "")
    assert right_letters([Scored([], text, answer="a b c d") for text in written]) == [1, 0.5, 0.5, 0.75, 0]
