"""Answers to tasks of evaluations, for people to read: the worst and some others of each task.

Invariant: `shown.json` is external data. An entry of an unexpected form is left out, without an error.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

CHARACTERS = 2000
"""The most characters of one text."""


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
    """The answers that are shown for one task with one filter, in one part."""

    part: str
    task: str
    filter: str
    metric: str  # that decides which answers are the worst
    shown: list[TaskAnswer] = field(default_factory=list)


def read_answers(part: str, document: Any) -> list[TaskAnswers]:
    """The content of `shown.json` of a part, by task."""
    entries = document.get("answers") if isinstance(document, dict) else None
    rows = [row for row in entries if isinstance(row, dict)] if isinstance(entries, list) else []
    found = []
    for (task, kind, metric), its in groupby(rows, lambda row: _texts(row, "task", "filter", "metric")):
        found.append(TaskAnswers(part, task, kind, metric, [_answer(row) for row in its]))
    return found


def _answer(row: dict[str, Any]) -> TaskAnswer:
    document, answers = row.get("document"), row.get("answers")
    chosen, prompt, filtered, target, metrics = _texts(
        row, "chosen", "prompt", "filtered", "target", "metrics"
    )
    return TaskAnswer(
        chosen=chosen,
        document=document if isinstance(document, int) else 0,
        prompt=prompt,
        answers=[str(text)[:CHARACTERS] for text in answers] if isinstance(answers, list) else [],
        filtered=filtered,
        target=target,
        metrics=metrics,
    )


def _texts(row: dict[str, Any], *names: str) -> tuple[str, ...]:
    return tuple(str(row.get(name) or "")[:CHARACTERS] for name in names)


def by_part(answers: Iterable[TaskAnswers]) -> dict[str, list[TaskAnswers]]:
    """The answers by the part that asked, in order of appearance."""
    found: dict[str, list[TaskAnswers]] = {}
    for one in answers:
        found.setdefault(one.part, []).append(one)
    return found
