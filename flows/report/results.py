"""Stored results of evaluations and classifiers: metrics, samples of text, rewards, answers to tasks.

Invariant: files of artifacts are external data. An entry of an unexpected form is left out, without an error.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Any

from flows.report.memorisation import NAME
from specs.published import Compared
from specs.stages.evaluate_reward import ENDS, MEASURES, OF_COMPARISON, OF_SOURCE
from specs.tokenizer_comparison import Comparison, Estimate

PROMPTS = 60  # shown at most
CHARACTERS = 4000  # of one text
ANSWER_CHARACTERS = 2000  # of one text of a task
# of a classifier
COLUMNS = ("documents", "precision", "recall", "auc", "average_precision")
OF_LANGUAGE = ("accuracy", "loss", "calibration_error")
MOST_LANGUAGES = 100  # shown for each label


@dataclass(frozen=True)
class GateResult:
    metric: str
    bound: str
    value: float | None  # None where nothing was measured
    failure: str | None  # None where the bound is met


@dataclass(frozen=True)
class Rewards:
    model: str
    against: str
    values: list[float]
    before: list[float]


@dataclass(frozen=True)
class ShownCompletion:
    model: str
    text: str
    reward: float | None


@dataclass
class Prompt:
    """A prompt with the completions of all models."""

    id: str
    text: str
    completions: list[ShownCompletion] = field(default_factory=list)


@dataclass(frozen=True)
class Evaluation:
    name: str
    stage: str
    of: str  # training stage whose checkpoint was measured
    checkpoint: str  # name of that checkpoint
    metrics: dict[str, float]
    gates: list[GateResult] = field(default_factory=list)
    published: list[Compared] = field(default_factory=list)
    rewards: Rewards | None = None

    def family(self, prefix: str) -> dict[str, float]:
        """The metrics with a prefix, without it: `perplexity/` -> `{"code": 12.0, ...}`."""
        named = [name for name in self.metrics if name.startswith(prefix)]
        return {name.removeprefix(prefix): self.metrics[name] for name in named}

    def estimate(self, name: str) -> Estimate | None:
        """A metric with its interval."""
        value, low, high = (self.metrics.get(f"{name}{end}") for end in ("", "/low", "/high"))
        if value is None or low is None or high is None:
            return None
        return Estimate(value=value, low=low, high=high)

    def at_numbers(self, prefix: str) -> dict[int, float]:
        """The metrics of `family` whose names are numbers, in ascending order."""
        numbered = {int(name): value for name, value in self.family(prefix).items() if name.isdecimal()}
        return dict(sorted(numbered.items()))


@dataclass(frozen=True)
class ComparedTokenizers:
    """The comparison of one `evaluate_tokenizers` stage."""

    name: str
    names: list[str]  # of the tokenizers, in the recipe's order
    comparison: Comparison
    gates: list[GateResult] = field(default_factory=list)
    published: list[Compared] = field(default_factory=list)


FAMILIES = (
    "perplexity/",
    "memorisation/",
    "loss/position/",
    "reward/",
    "kl/",
    "forgetting/",
    "sharpness",
    "sparsity",
)
# metrics that a chart or a table shows, beside those of memorisation
DRAWN = re.compile(
    r"perplexity(/.*)?|loss/position/\d+|forgetting/.*|reward/(mean|against|prompts|difference(/(low|high))?)"
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
    return [name for name in names if not (DRAWN.fullmatch(name) or NAME.fullmatch(name))]


def read_rewards(document: Any) -> Rewards | None:
    """The content of `rewards.json`; None when it has no reward."""
    rows = _rows(document, "rows")
    values = [value for row in rows if (value := number(row.get("reward"))) is not None]
    before = [value for row in rows if (value := number(row.get("against"))) is not None]
    if not values:
        return None
    names = _text(document.get("model"), "this model"), _text(document.get("against"), "before")
    return Rewards(*names, values, before)


def read_samples(document: Any) -> list[Prompt]:
    prompts = []
    for entry in _rows(document, "prompts"):
        prompts.append(Prompt(_text(entry.get("id"), ""), _text(entry.get("prompt"), "")))
        for row in _rows(entry, "completions"):
            model, text = _text(row.get("model"), "model"), _text(row.get("text"), "")
            prompts[-1].completions.append(ShownCompletion(model, text, number(row.get("reward"))))
    return prompts


def side_by_side(sampled: Iterable[list[Prompt]]) -> list[Prompt]:
    """The prompts of several evaluations, with equal prompts joined and each completion once."""
    joined: dict[tuple[str, str], Prompt] = {}
    for prompt in chain.from_iterable(sampled):
        known = joined.setdefault((prompt.id, prompt.text), Prompt(prompt.id, prompt.text)).completions
        known += [completion for completion in prompt.completions if completion not in known]
    return list(joined.values())


def _rows(document: Any, name: str) -> list[dict[str, Any]]:
    """The objects in the list that a document has under a name."""
    rows = document.get(name) if isinstance(document, dict) else None
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _text(value: Any, default: str) -> str:
    text = default if value is None else str(value)
    if len(text) <= CHARACTERS:
        return text
    return f"{text[:CHARACTERS]} … ({len(text) - CHARACTERS:,} more characters)"


# Answers to tasks


@dataclass(frozen=True)
class TaskAnswer:
    """One document of a task, and what the model answered."""

    chosen: str  # worst, or random
    document: int
    prompt: str
    answers: list[str]
    filtered: str
    target: str
    metrics: str


@dataclass(frozen=True)
class TaskAnswers:
    """The answers that are shown for one task with one filter."""

    task: str
    filter: str
    metric: str  # that decides which answers are the worst
    shown: list[TaskAnswer] = field(default_factory=list)


def read_answers(document: Any) -> list[TaskAnswers]:
    """The content of `shown.json` of a part, by task."""

    def texts(row: dict[str, Any], *names: str) -> tuple[str, ...]:
        return tuple(str(row.get(name) or "")[:ANSWER_CHARACTERS] for name in names)

    def answer(row: dict[str, Any]) -> TaskAnswer:
        names = ("chosen", "prompt", "filtered", "target", "metrics")
        number, answers = row.get("document"), row.get("answers")
        return TaskAnswer(
            document=number if isinstance(number, int) else 0,
            answers=[str(text)[:ANSWER_CHARACTERS] for text in answers] if isinstance(answers, list) else [],
            **dict(zip(names, texts(row, *names), strict=True)),
        )

    rows = groupby(_rows(document, "answers"), lambda row: texts(row, "task", "filter", "metric"))
    return [
        TaskAnswers(task, kind, metric, [answer(row) for row in of_task])
        for (task, kind, metric), of_task in rows
    ]


# Classifiers


@dataclass(frozen=True)
class Classified:
    name: str
    metrics: dict[str, float]
    labels: dict[str, dict[str, float]]  # metrics by label
    languages: dict[str, dict[str, float]]  # metrics by language, if each language has a model
    reliability: list[dict[str, float]]  # bins of the calibration
    thresholds: list[tuple[str, str, dict[str, float]]]  # label, language ("": all), threshold by percentile
    more: int  # languages that are not shown
    gates: list[GateResult]

    @property
    def percentiles(self) -> list[str]:
        return list(dict.fromkeys(percentile for _, _, values in self.thresholds for percentile in values))

    @classmethod
    def of(
        cls, name: str, metrics: dict[str, Any], facts: dict[str, Any], gates: list[GateResult]
    ) -> Classified:
        """Reads the metrics and facts of a manifest."""
        flat, labels = numbers(metrics), defaultdict[str, dict[str, float]](dict)
        for key, value in flat.items():
            metric, _, label = key.partition("/")
            if label and metric in COLUMNS:
                labels[label][metric] = value
        thresholds, more = list[tuple[str, str, dict[str, float]]](), 0
        for label, languages in _items(facts.get("thresholds")):
            of_label = [(label, language, numbers(values)) for language, values in _items(languages)]
            thresholds += of_label[:MOST_LANGUAGES]
            more += len(of_label[MOST_LANGUAGES:])
        return cls(
            name,
            {key: value for key, value in flat.items() if "/" not in key},
            labels,
            {language: numbers(values) for language, values in _items(metrics.get("languages"))},
            [numbers(row) for row in _rows(metrics, "reliability")],
            thresholds,
            more,
            gates,
        )


def _items(value: Any) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, dict) else []
