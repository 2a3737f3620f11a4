"""The offline completions of a prompt, and the choice of two completions as a pair.

The rule is that of the published code (swiss-ai/posttraining, prepare_train_dataset_swissaiformat.py; report,
section 4.1.4): rewards become quantiles among the reference rewards, those of the completions that the model
itself sampled; one of the best completions is paired with one of the worst.

Invariants:
- The chosen completion of a pair has a higher reward than the rejected one, and different tokens.
- Offline completions are in the order of their rewards: those of conversations, then those of each generator.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from apertus_model.data.rows import Row, Rows
from infra.store import Attempt


@dataclass(frozen=True)
class Candidate:
    """A completion that can be chosen."""

    text: str
    tokens: tuple[int, ...]
    reward: float
    quantile: float
    origin: str  # "offline" or "sampled"
    # `model` and `persona` of a completion that a generator made
    maker: Mapping[str, str] = field(default_factory=dict, compare=False)


Pair = tuple[Candidate, Candidate]


class NoPair(Exception):
    """A prompt without a pair; its `str` is the reason under which the prompt is counted."""


def quantiles(rewards: Sequence[float], reference: Sequence[float]) -> list[float]:
    """The share of the reference rewards that are no larger than each reward (arXiv 2507.08068, equation 7).
    Example: rewards [3, 1, 2], reference [1, 2] -> [1, 0.5, 1]."""
    ordered = np.sort(np.asarray(reference, np.float64))
    places = np.searchsorted(ordered, np.asarray(rewards, np.float64), side="right")
    return (places / len(reference)).tolist()


def random_of(seed: int, prompt: str) -> Random:
    """The random numbers of a prompt's pairs, a function of the seed and the prompt's id."""
    return Random(hashlib.blake2b(json.dumps([seed, prompt]).encode(), person=b"apertus-pair").digest())


def choose(candidates: Sequence[Candidate], random: Random, *, reference: int, worst_quantile: float) -> Pair:
    """The pair of a prompt: (chosen, rejected).

    A completion is among the best when no reference reward is above its own (quantile 1), among the worst
    when its quantile is at most `worst_quantile` or 1 / `reference`, and in the middle otherwise. Each class
    is ordered by quantile, the highest first; completions of equal quantile are shuffled, so that the order
    of the generators has no influence. The chosen completion is the first of the best, else of the middle,
    else of the worst; the rejected one is the first of the worst, so the best of them, else of the middle,
    else of the best.

    Beyond the published rule, completions with the tokens of an earlier one are skipped, the two rewards
    differ, and of two completions of one class the one with the higher reward is chosen. Quantiles are among
    all that the model sampled; the published code removes completions that are too long before.

    Args:
        candidates: completions that are short enough.
        random: orders completions of equal quantile.
        reference: number of reference rewards.
    """
    if reference < 2:
        raise NoPair("few_reference_rewards")
    ordered = distinct(candidates)
    if len(ordered) < 2:
        raise NoPair("few_different_completions")
    random.shuffle(ordered)
    ordered.sort(key=lambda candidate: -candidate.quantile)
    limit = max(worst_quantile, 1 / reference)
    best = [candidate for candidate in ordered if candidate.quantile >= 1]
    worst = [candidate for candidate in ordered if candidate.quantile <= limit and candidate.quantile < 1]
    middle = [candidate for candidate in ordered if limit < candidate.quantile < 1]
    return _pair(ordered[0], [*worst, *middle, *best], "equal_rewards")


def choose_further(candidates: Sequence[Candidate], pair: Pair, random: Random) -> Pair:
    """Another pair, of unused completions drawn at random: one of quantile >= 0.5 and one below, or two of
    the same half when the other has none. NoPair when fewer than two rewards are left."""
    gone = {candidate.tokens for candidate in pair}
    left = [candidate for candidate in distinct(candidates) if candidate.tokens not in gone]
    random.shuffle(left)
    upper = [candidate for candidate in left if candidate.quantile >= 0.5]
    lower = [candidate for candidate in left if candidate.quantile < 0.5]
    if not left:
        raise NoPair("no_further_pair")
    return _pair([*upper, *lower][0], [*lower, *upper], "no_further_pair")


def _pair(first: Candidate, others: Sequence[Candidate], otherwise: str) -> Pair:
    """`first` and the first of `others` with a different reward, the higher reward first. NoPair with the
    reason `otherwise` when all have the same reward."""
    second = next((other for other in others if other.reward != first.reward), None)
    if second is None:
        raise NoPair(otherwise)
    return (first, second) if first.reward > second.reward else (second, first)


def distinct(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates in order, of those with the same tokens only the first."""
    first: dict[tuple[int, ...], Candidate] = {}
    for candidate in candidates:
        first.setdefault(candidate.tokens, candidate)
    return list(first.values())


def generated_by(attempt: Attempt) -> list[Rows]:
    """The completions of each generator among the inputs of a part, `generated:<i>`."""
    roles = [role for role in attempt.job.inputs if role.startswith("generated:")]
    return [Rows(attempt.input_artifact(f"generated:{number}")) for number in range(len(roles))]


def offline_completions(
    prompt: Row, generated: Sequence[Row] = (), models: Sequence[str] = ()
) -> Iterator[tuple[Row, dict[str, Any]]]:
    """Yields each completion of a row of `prompts`, and of each generator's row for it, with its `model` and
    `persona`, where they are known. `models`: names of the generators; empty where they do not matter."""
    yield from ((completion, {}) for completion in prompt["completions"])
    for number, row in enumerate(generated):
        assert row["id"] == prompt["id"]
        maker: dict[str, Any] = {"model": models[number]} if models else {}
        if "persona" in row:
            maker["persona"] = row["persona"]
        yield from ((completion, maker) for completion in row["completions"])
