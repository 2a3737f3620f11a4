"""Conversations that continue letters with letters, by a rule or without one, and long chains of letters
whose last line can be verified.

Invariants: prompts and answers are drawn from the hash of a docstring of a Python file, which is parsed and
never executed. The rule is the same in all conversations, but for chains, whose prompts name one of four.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import BinaryIO

from apertus_model.data.conversations.stored import Conversation
from apertus_model.data.documents.parsed import Parsed, Rejection
from apertus_model.rewards.base import Scored
from examples.documents import docstrings
from specs.sources import SourceSpec

CHAINED = "abcdefgh"
RULES = {
    name: dict(zip(CHAINED, random.Random(name).sample(CHAINED, len(CHAINED)), strict=True))
    for name in "1234"
}
"""By the name of a rule, the letter that follows each letter in a chain."""
LINES, LETTERS = string.ascii_uppercase, 4  # of a chain

Reader = Callable[[BinaryIO, SourceSpec, str], Iterator[Conversation | Rejection]]
RULE = dict(zip(string.ascii_lowercase, random.Random(28).sample(string.ascii_lowercase, 26), strict=True))
"""The letter that follows each letter."""


def answers(
    file: BinaryIO, source: SourceSpec, path: str, *, length: int, by_rule: bool
) -> Iterator[Conversation | Rejection]:
    """A conversation for each docstring: a prompt of `length` letters, and as many in the answer, each of
    which follows from the letter before it by the rule, or is drawn at random."""
    for text in docstrings(file, source, path):
        if isinstance(text, Rejection):
            yield text
            continue
        drawn = random.Random(str(text)).choices(string.ascii_lowercase, k=2 * length)
        prompt, answer = drawn[:length], drawn[length:]
        for place in range(length if by_rule else 0):
            answer[place] = RULE[[*prompt, *answer][length + place - 1]]
        yield _conversation(" ".join(prompt), " ".join(answer))


def _conversation(prompt: str, answer: str) -> Conversation:
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return Conversation(id=prompt, messages=messages, completions=[answer], group=prompt)


rule_of_4: Reader = partial(answers, length=4, by_rule=True)
rule_of_8: Reader = partial(answers, length=8, by_rule=True)
random_of_4: Reader = partial(answers, length=4, by_rule=False)
random_of_8: Reader = partial(answers, length=8, by_rule=False)


def chain(first: Sequence[str]) -> str:
    """A line for each capital, with letters after it. `first`: the name of one of the rules, and letters, the
    last of which they follow. After one mistake, the last line is wrong; nothing has to be counted."""
    rule, letter = RULES[first[0]], first[-1]
    lines = ([letter := rule[letter] for _ in range(LETTERS)] for _ in LINES)
    return "\n".join(" ".join([name, *letters]) for name, letters in zip(LINES, lines, strict=True))


def chains(file: BinaryIO, source: SourceSpec, path: str) -> Parsed:
    """A document for each docstring: a rule and letters that the text decides, and their chain."""
    for conversation in chain_questions(file, source, path):
        if isinstance(conversation, Rejection):
            yield conversation
        else:
            yield "\n".join(str(message["content"]) for message in conversation.messages)


def chain_questions(file: BinaryIO, source: SourceSpec, path: str) -> Iterator[Conversation | Rejection]:
    """A conversation for each docstring: a rule and letters that the text decides, answered by their
    chain."""
    for text in docstrings(file, source, path):
        if isinstance(text, Rejection):
            yield text
        else:
            drawn = random.Random(str(text))
            first = [drawn.choice([*RULES]), *drawn.choices(CHAINED, k=4)]
            yield _conversation(" ".join(first), chain(first))


def last_line(items: Sequence[Scored]) -> list[float]:
    """A reward: 1 for a completion whose last line is that of the documented answer, else 0."""
    return [
        float(item.completion.strip().split("\n")[-1] == item.reference().split("\n")[-1]) for item in items
    ]


def right_letters(items: Sequence[Scored]) -> list[float]:
    """A reward: the share of the letters of the documented answer that the completion has at their places."""
    return [_share(item.completion.split(), item.reference().split()) for item in items]


def _share(letters: list[str], right: list[str]) -> float:
    return sum(own == other for own, other in zip(letters, right, strict=False)) / len(right)
