"""Stored results of evaluations: metrics by family, samples of text, rewards per prompt.

Invariant: files of artifacts are external data. An entry of an unexpected form is left out, without an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from flows.report.memorisation import NAME
from specs.published import Compared
from specs.stages.evaluate_reward import ENDS, MEASURES, OF_COMPARISON, OF_SOURCE
from specs.tokenizer_comparison import Comparison, Estimate

PROMPTS = 60  # shown at most
CHARACTERS = 4000  # of one text


@dataclass(frozen=True)
class Gate:
    """A bound on a metric."""

    metric: str
    bound: str
    value: float | None  # None where nothing was measured
    failure: str | None  # None where the bound is met


@dataclass(frozen=True)
class Rewards:
    """Rewards per prompt of a model, and of the model it is compared with."""

    model: str
    against: str
    values: list[float]
    before: list[float]


@dataclass(frozen=True)
class Completion:
    model: str
    text: str
    reward: float | None


@dataclass
class Prompt:
    """A prompt with the completions of all models."""

    id: str
    text: str
    completions: list[Completion] = field(default_factory=list)


@dataclass(frozen=True)
class Evaluation:
    """The numbers of one evaluation."""

    name: str
    stage: str
    of: str  # training stage whose checkpoint was measured
    checkpoint: str  # name of that checkpoint
    metrics: dict[str, float]
    gates: list[Gate] = field(default_factory=list)
    published: list[Compared] = field(default_factory=list)
    rewards: Rewards | None = None

    def family(self, prefix: str) -> dict[str, float]:
        """The metrics with a prefix, without it: `perplexity/` -> `{"code": 12.0, ...}`."""
        return {
            name.removeprefix(prefix): value
            for name, value in self.metrics.items()
            if name.startswith(prefix)
        }

    def estimate(self, name: str) -> Estimate | None:
        """A metric with its interval."""
        value, low, high = (self.metrics.get(f"{name}{end}") for end in ("", "/low", "/high"))
        if value is None or low is None or high is None:
            return None
        return Estimate(value=value, low=low, high=high)

    def at_numbers(self, prefix: str) -> dict[int, float]:
        """The metrics of `family` whose names are numbers, in ascending order."""
        found = {int(name): value for name, value in self.family(prefix).items() if name.isdecimal()}
        return dict(sorted(found.items()))


@dataclass(frozen=True)
class ComparedTokenizers:
    """The comparison of one `evaluate_tokenizers` stage."""

    name: str
    names: list[str]  # of the tokenizers, in the recipe's order
    comparison: Comparison
    gates: list[Gate] = field(default_factory=list)
    published: list[Compared] = field(default_factory=list)


FAMILIES = (
    "perplexity/",
    "memorisation/",
    "loss/position/",
    "reward/",
    "kl/",
    "forgetting/",
    "sharpness",
)
DRAWN = ("perplexity/", "loss/position/", "forgetting/")
REWARD_NUMBERS = (
    "reward/mean",
    "reward/against",
    "reward/difference",
    "reward/difference/low",
    "reward/difference/high",
    "reward/prompts",
)


def agreement_rows(evaluations: Iterable[Evaluation]) -> dict[str, str]:
    """The descriptions of the metrics that evaluations of rewards have, by the name of the metric."""
    names = dict.fromkeys(name for evaluation in evaluations for name in evaluation.metrics)
    return {name: text for name, text in (MEASURES | OF_COMPARISON).items() if name in names} | {
        name: f"accuracy on {name.removeprefix(OF_SOURCE)}"
        for name in names
        if name.startswith(OF_SOURCE) and not name.endswith(ENDS[1:])
    }


def numbers(metrics: Any) -> dict[str, float]:
    """The finite numbers of a flat dict."""
    if not isinstance(metrics, dict):
        return {}
    return {str(name): value for name, value in metrics.items() if number(value) is not None}


def number(value: Any) -> float | None:
    """A finite number, or None."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return value
    return None


def is_evaluation(kind: str, roles: Iterable[str], metrics: dict[str, float]) -> bool:
    """Whether a part measured a checkpoint: its kind says so, or its metrics do."""
    return bool(metrics) and (
        kind == "evaluate" or ("checkpoint" in roles and any(name.startswith(FAMILIES) for name in metrics))
    )


def undrawn(evaluations: Iterable[Evaluation]) -> list[str]:
    """Names of the metrics that no chart or table shows, in order of appearance."""
    names = dict.fromkeys(name for evaluation in evaluations for name in evaluation.metrics)
    return [name for name in names if not _is_drawn(name)]


def _is_drawn(name: str) -> bool:
    family = name.partition("/")[0]
    if family == "memorisation":
        return NAME.fullmatch(name) is not None
    if name.startswith("loss/position/"):
        return name.removeprefix("loss/position/").isdecimal()
    return name == "perplexity" or name in REWARD_NUMBERS or name.startswith(DRAWN)


def read_rewards(document: Any) -> Rewards | None:
    """The content of `rewards.json`; None when it has no reward."""
    rows = [row for row in _entries(document, "rows") if isinstance(row, dict)]
    values = [value for row in rows if (value := number(row.get("reward"))) is not None]
    before = [value for row in rows if (value := number(row.get("against"))) is not None]
    if not values:
        return None
    return Rewards(
        _text(document.get("model"), "this model"), _text(document.get("against"), "before"), values, before
    )


def read_samples(document: Any) -> list[Prompt]:
    """The prompts of `samples.json`."""
    prompts = []
    for entry in _entries(document, "prompts"):
        if isinstance(entry, dict):
            completions = [
                Completion(
                    _text(item.get("model"), "model"), _text(item.get("text"), ""), number(item.get("reward"))
                )
                for item in _entries(entry, "completions")
                if isinstance(item, dict)
            ]
            prompts.append(Prompt(_text(entry.get("id"), ""), _text(entry.get("prompt"), ""), completions))
    return prompts


def side_by_side(sampled: Iterable[list[Prompt]]) -> list[Prompt]:
    """The prompts of several evaluations, with equal prompts joined and each completion once."""
    found: dict[tuple[str, str], Prompt] = {}
    for prompts in sampled:
        for prompt in prompts:
            known = found.setdefault((prompt.id, prompt.text), Prompt(prompt.id, prompt.text))
            known.completions += [
                completion for completion in prompt.completions if completion not in known.completions
            ]
    return list(found.values())


def _entries(document: Any, name: str) -> list[Any]:
    found = document.get(name) if isinstance(document, dict) else None
    return found if isinstance(found, list) else []


def _text(value: Any, default: str) -> str:
    text = default if value is None else str(value)
    if len(text) <= CHARACTERS:
        return text
    return f"{text[:CHARACTERS]} … ({len(text) - CHARACTERS:,} more characters)"
