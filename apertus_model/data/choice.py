"""Chooses two completions of a prompt as a pair.

The rule is that of the Apertus report (section 4.1.4 and the published recipe): rewards become quantiles
among the reference rewards, those of the completions that the model itself sampled; one of the best
completions is paired with one of the worst.

Invariant: the chosen completion of a pair has a higher reward than the rejected one, and different tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np


@dataclass(frozen=True)
class Candidate:
    """A completion that can be chosen. Candidates are ordered: offline ones, then sampled ones, each in
    stored order."""

    text: str
    tokens: tuple[int, ...]
    reward: float
    quantile: float
    origin: str  # "offline" or "sampled"
    made: Mapping[str, str] = field(
        default_factory=dict, compare=False
    )  # `model` and `persona` of a completion that a generator made


Pair = tuple[Candidate, Candidate]


class NoPair(Exception):
    """A prompt without a pair; its `str` is the reason under which the prompt is counted."""


def quantiles(rewards: Sequence[float], reference: Sequence[float]) -> list[float]:
    """The share of the reference rewards that are no larger than each reward (arXiv 2507.08068, equation 7).

    Example: rewards [3, 1, 2], reference [1, 2] -> [1, 0.5, 1].
    """
    places = np.searchsorted(
        np.sort(np.asarray(reference, np.float64)), np.asarray(rewards, np.float64), side="right"
    )
    return (places / len(reference)).tolist()


def choose(candidates: Sequence[Candidate], *, reference: int, worst_quantile: float) -> Pair:
    """The pair of a prompt: (chosen, rejected).

    A completion is among the best when no reference reward is above its own (quantile 1), among the worst
    when its quantile is at most `worst_quantile` or 1 / `reference`, and in the middle otherwise. The chosen
    completion is the first of the best, else of the middle, else of the worst; the rejected one is the first
    of the worst, else of the middle, else of the best, with a different reward. When both come from the same
    class, the one with the higher reward is chosen. Completions with the tokens of an earlier one are
    skipped.

    Args:
        candidates: completions that are short enough, in order.
        reference: number of reference rewards.
        worst_quantile: see above.

    Raises:
        NoPair: with the reason.
    """
    if reference < 2:
        raise NoPair("few_reference_rewards")
    different = distinct(candidates)
    if len(different) < 2:
        raise NoPair("few_different_completions")
    limit = max(worst_quantile, 1 / reference)
    best = [one for one in different if one.quantile >= 1]
    worst = [one for one in different if one.quantile <= limit and one.quantile < 1]
    middle = [one for one in different if limit < one.quantile < 1]
    chosen = [*best, *middle, *worst][0]
    rejected = next((one for one in [*worst, *middle, *best] if one.reward != chosen.reward), None)
    if rejected is None:
        raise NoPair("equal_rewards")
    return (chosen, rejected) if chosen.reward > rejected.reward else (rejected, chosen)


def choose_further(candidates: Sequence[Candidate], taken: Pair, *, seed: int, prompt: str) -> Pair:
    """Another pair, drawn at random (by a hash of seed and prompt): one unused completion of quantile >= 0.5
    and one below. NoPair when one of the two kinds is missing."""
    random = Random(hashlib.blake2b(json.dumps([seed, prompt]).encode(), person=b"apertus-pair").digest())
    gone = {one.tokens for one in taken}
    left = [one for one in distinct(candidates) if one.tokens not in gone]
    upper = [one for one in left if one.quantile >= 0.5]
    lower = [one for one in left if one.quantile < 0.5]
    if not upper or not lower:
        raise NoPair("no_further_pair")
    return random.choice(upper), random.choice(lower)


def distinct(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates in order, of those with the same tokens only the first."""
    first: dict[tuple[int, ...], Candidate] = {}
    for candidate in candidates:
        first.setdefault(candidate.tokens, candidate)
    return list(first.values())
