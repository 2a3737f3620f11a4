"""Rewards that are computed from text alone, and can be verified by reading.

Invariant: a value is in [0, 1] and depends only on the completion and the documented answer. A change of any
value raises the version in `specs.rewards.REWARDS`.
"""

import re
from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

from apertus_model.rewards.base import Scored

Item = TypeVar("Item")

# Parts of `grounded-answer` and their weights, which sum to 1.
WEIGHTS = {
    "words": 0.22,  # share of the documented content words that occur, a word counting by its length
    # mean F1 of runs of 1 to 3 characters (as in chrF, Popović 2015): credit for words that are almost right,
    # few ties
    "letters": 0.15,
    "name": 0.05,  # the function's name occurs, where the documented answer has it
    "finished": 0.25,  # the model ended by itself
    # share of word bigrams that are not repetitions, counted at most as in the documented answer
    "variety": 0.15,
    "length": 0.18,  # shorter over longer of the two lengths, in characters
}
assert abs(sum(WEIGHTS.values()) - 1) < 1e-12
_STOP = """
a an and are as at be by can for from has have if in into is it
its no not of on or that the their then there this to was when which will with
"""
STOP_WORDS = frozenset(_STOP.split())


def reference_overlap(item: Scored) -> float:
    """Mean of the F1 of words and of pairs of words (ROUGE-1 and ROUGE-2 of Lin 2004, "ROUGE: a package
    for automatic evaluation of summaries") between completion and documented answer, in lower case. For
    a one-word answer, which has no pairs, the F1 of words alone."""
    reference, completion = words(item.reference()), words(item.completion)
    orders = [n for n in (1, 2) if len(reference) >= n]
    if not orders:
        return 0.0
    return sum(f1(grams(completion, n), grams(reference, n)) for n in orders) / len(orders)


def grounded_answer(item: Scored) -> float:
    """Agreement of a completion with the documented answer (the conversation's, else the metadata's
    `summary`): the sum weighted by `WEIGHTS`. 0 for an empty text; 1 for the answer itself."""
    reference, completion = (item.answer or item.reference()).strip(), item.completion.strip()
    if not completion:
        return 0.0
    documented, written = words(reference), words(completion)
    content = set(documented) - STOP_WORDS or set(documented)
    name = str(item.metadata.get("function", "")).rsplit(".", 1)[-1].lower()
    letters = sum(map(len, content))
    orders = range(1, min(3, len(reference)) + 1)
    parts = {
        "words": sum(len(word) for word in content & set(written)) / letters if letters else 0.0,
        "letters": sum(f1(grams(completion.lower(), n), grams(reference.lower(), n)) for n in orders)
        / len(orders),
        "name": float(name not in reference.lower() or name in completion.lower()),
        "finished": float(item.finished),
        "variety": min(1.0, variety(written) / variety(documented)) if documented else 0.0,
        "length": min(len(completion), len(reference)) / max(len(completion), len(reference)),
    }
    return min(1.0, sum(WEIGHTS[part] * value for part, value in parts.items()))


def words(text: str) -> list[str]:
    """Runs of letters, digits and underscores, in lower case."""
    return re.findall(r"\w+", text.lower())


def grams(items: Sequence[Item], n: int) -> Counter[tuple[Item, ...]]:
    """The number of occurrences of each run of n items."""
    return Counter(tuple(items[i : i + n]) for i in range(len(items) - n + 1))


def f1(first: Counter[Item], second: Counter[Item]) -> float:
    """Harmonic mean of precision and recall of what two counts share; 0 when either is empty."""
    total = first.total() + second.total()
    return 2 * (first & second).total() / total if total else 0.0


def variety(written: Sequence[str]) -> float:
    """The number of different bigrams over that of all bigrams; 1 for a single word, 0 for no word."""
    if len(written) < 2:
        return float(len(written))
    return len(grams(written, 2)) / (len(written) - 1)
