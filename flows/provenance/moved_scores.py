"""Finds the scores that move between two parts: with another constitution, another judge, another reward.

Invariant: it only reads. Scores are compared completion by completion, if both parts have read the same ones.
"""

import heapq
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from infra.store import Artifact, StoreError
from specs.differences import Change, changes
from specs.judge import clauses

SCORED = {"rewards": ("prompts", "completions", "generated:"), "evaluate_reward": ("conversations:",)}
"""The kinds of parts that score, with the roles, or beginnings of roles, of the inputs that they score."""
CONSTITUTION = "constitution.txt"
SHOWN = 10
CHARACTERS = 60  # of a prompt


@dataclass(frozen=True)
class Score:
    """A completion with both of its scores."""

    about: str  # the prompt, or the id of the pair
    completion: str  # such as `sampled 3`
    a: float
    b: float


@dataclass
class MovedScores:
    """Counts over all completions, and the scores that move most."""

    completions: int = 0
    moved: int = 0
    total: float = 0.0  # sum of B - A
    pairs: int = 0  # of completions of a prompt
    swapped: int = 0  # pairs of which A and B prefer different completions
    largest: list[Score] = field(default_factory=list)  # the largest first
    clauses: list[Change[str]] = field(default_factory=list)  # that differ between the constitutions

    @property
    def mean(self) -> float:
        return self.total / self.completions

    def to_json(self) -> dict[str, Any]:
        counts = {name: getattr(self, name) for name in ("completions", "moved", "mean", "pairs", "swapped")}
        return counts | {
            "largest": [vars(score) for score in self.largest],
            "clauses": [clause.to_json() for clause in self.clauses],
        }


def moved_scores(a: Artifact, b: Artifact) -> MovedScores | None:
    """The comparison of finished parts; None unless both have readable scores of the same completions."""
    kind = a.identity.kind
    if kind != b.identity.kind or kind not in SCORED or _scored(a) != _scored(b):
        return None
    try:
        return _compared(a, b)
    except (StoreError, OSError, ValueError, KeyError, TypeError):
        return None


def _compared(a: Artifact, b: Artifact) -> MovedScores:
    """The comparison of two parts. ValueError when their rows are not of the same completions."""
    from apertus_model.data.rows import Rows

    result = MovedScores(clauses=changes(_clauses(a), _clauses(b)))
    largest: list[tuple[float, int, int, Score]] = []  # distance, -row, -place, score
    for row, (own, other) in enumerate(zip(Rows(a), Rows(b), strict=True)):
        if own["id"] != other["id"]:
            raise ValueError(f"row {row} is of {own['id']} and of {other['id']}")
        values = _values(own)
        scores = list(zip(values, values.values(), _values(other).values(), strict=True))
        for place, (name, first, second) in enumerate(scores):
            result.completions += 1
            result.moved += first != second
            result.total += second - first
            score = Score(str(own["id"]), name, first, second)
            if first != second:
                heapq.heappush(largest, (abs(second - first), -row, -place, score))
            if len(largest) > SHOWN:
                heapq.heappop(largest)
        for (_, first, second), (_, third, fourth) in combinations(scores, 2):
            result.pairs += 1
            result.swapped += (first - third) * (second - fourth) < 0
    result.largest = [
        replace(score, about=_about(a, -row) or score.about)
        for _, row, _, score in sorted(largest, key=lambda entry: entry[:3], reverse=True)
    ]
    return result


def _scored(artifact: Artifact) -> dict[str, str]:
    """The fingerprints of the inputs that a part scored, by role."""
    begins, inputs = SCORED[artifact.identity.kind], artifact.identity.inputs
    return {role: input_.fingerprint for role, input_ in inputs.items() if role.startswith(begins)}


def _values(row: dict[str, Any]) -> dict[str, float]:
    if "offline" not in row:
        return {name: row[name] for name in ("chosen", "rejected") if name in row}
    origins = ("offline", "sampled")
    return {f"{name} {number}": value for name in origins for number, value in enumerate(row[name], 1)}


def _about(artifact: Artifact, index: int) -> str | None:
    """The end of the last message of a prompt; None where the prompts are gone."""
    from apertus_model.data.rows import Rows

    prompts = artifact.identity.inputs.get("prompts")
    if prompts is None or prompts.place is None:
        return None
    try:
        rows = Rows(Artifact(artifact.store, prompts.place))
        return str(rows[index]["messages"][-1]["content"])[-CHARACTERS:]
    except (StoreError, OSError, ValueError, LookupError, TypeError):
        return None


def _clauses(artifact: Artifact) -> dict[str, str]:
    if CONSTITUTION not in artifact.manifest.files:
        return {}
    return clauses(artifact.bytes(CONSTITUTION).decode())
