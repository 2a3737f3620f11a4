"""Counts by language, host and agent."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from datatrove.data import Document

from apertus_model.data.filters import Drop
from apertus_model.data.robots_rules import Exclusion
from apertus_model.data.tallies import Tally, Task, excluded, languages, top_domains, top_languages, total

STEPS = ["robots", "exact-duplicates", "length"]
CLOSED = Drop("a", "b", Exclusion("a.example", ("CCBot", "GPTBot"), "c"))


def _document(language: str | None) -> Document:
    return Document("text", "id", metadata={} if language is None else {"language": language})


def test_counts_follow_what_the_steps_over_the_source_decide(tmp_path: Path) -> None:
    one, two = Tally(), Tally()
    one.add(_document("deu"), 10, CLOSED, "robots")
    one.add(_document("deu"), 20, CLOSED, "robots")
    one.add(_document("deu"), 5, None, None)  # kept
    one.add(_document("fra"), 7, None, None)  # a duplicate
    two.add(_document(None), 3, Drop("d", "e"), None)  # too short
    two.add(_document("fra"), 9, CLOSED, None)  # would be excluded, and is a duplicate before that
    tasks = []
    for name, tally, outcomes, tokens in (
        ("one", one, [3, 1], [4, 0]),
        ("two", two, [2, 1], [0, 0]),
    ):
        tally.write(tmp_path / name)
        tasks.append(Task(tmp_path / name, np.array(outcomes), np.array(tokens)))
    groups = total(tasks, STEPS)
    assert groups.equals(total(tasks[::-1], STEPS))
    assert top_languages(languages(groups)) == {
        "deu": {
            "kept": {"documents": 1, "characters": 5, "tokens": 4},
            "robots": {"documents": 2, "characters": 30},
        },
        "fra": {"exact-duplicates": {"documents": 2, "characters": 16}},
        "": {"length": {"documents": 1, "characters": 3}},
    }
    rows = excluded(groups, ["robots"])
    counts = {"documents": 2, "characters": 30}
    assert rows == [
        {"domain": "a.example", "agent": agent, **counts} for agent in ("(any)", "CCBot", "GPTBot")
    ]
    assert top_domains(rows) == rows[:1]


def test_an_empty_task_counts_nothing(tmp_path: Path) -> None:
    Tally().write(tmp_path / "t")
    groups = total([Task(tmp_path / "t", np.array([], int), np.array([], int))], STEPS)
    assert (
        groups.num_rows == 0 and excluded(groups, ["robots"]) == [] and top_languages(languages(groups)) == {}
    )
