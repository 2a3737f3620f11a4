"""Conversations that continue letters with letters, by a rule or without one.

Invariants: prompts and answers are drawn from the hash of a docstring of a Python file, which is parsed and
never executed, so different docstrings give different prompts. The rule is the same in all conversations.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterator
from functools import partial
from typing import BinaryIO

from apertus_model.data.conversations.stored import Conversation
from apertus_model.data.documents.parsed import Rejection
from examples.documents import docstrings
from specs.sources import SourceSpec

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
        yield Conversation(
            id=" ".join(prompt),
            messages=[
                {"role": "user", "content": " ".join(prompt)},
                {"role": "assistant", "content": " ".join(answer)},
            ],
            completions=[" ".join(answer)],
            group=" ".join(prompt),
        )


rule_of_4: Reader = partial(answers, length=4, by_rule=True)
rule_of_8: Reader = partial(answers, length=8, by_rule=True)
random_of_4: Reader = partial(answers, length=4, by_rule=False)
random_of_8: Reader = partial(answers, length=8, by_rule=False)
