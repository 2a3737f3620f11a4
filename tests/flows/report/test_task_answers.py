from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flows.planning.plan import Plan
from flows.report import render
from flows.report.content import collect
from flows.report.results import read_answers
from tests.flows.report.report_store import store

ENTRY: dict[str, Any] = {
    "task": "arc",
    "filter": "none",
    "chosen": "worst",
    "metric": "acc",
    "document": 7,
    "prompt": "Which <of> these?",
    "answers": [" one (-1.50)", " two (-2.50)"],
    "filtered": "[]",
    "target": "1",
    "metrics": '{"acc": 0.0}',
}


def test_answers_are_read_by_task_and_filter() -> None:
    document = {"answers": [ENTRY, ENTRY | {"chosen": "random"}, ENTRY | {"filter": "strict"}]}
    first, second = read_answers(document)
    assert (first.task, first.filter, first.metric, len(first.shown)) == ("arc", "none", "acc", 2)
    assert [answer.chosen for answer in first.shown] == ["worst", "random"]
    assert second.filter == "strict" and first.shown[0].document == 7


def test_entries_of_another_form_are_left_out() -> None:
    assert read_answers(None) == read_answers({"answers": 3}) == []
    (found,) = read_answers({"answers": [3, {"task": "x", "answers": "no", "document": "7"}]})
    assert found.shown[0].answers == [] and found.shown[0].document == 0


def test_the_report_shows_answers_to_tasks(planned: Callable[..., Plan]) -> None:
    plan = planned(
        "stages.evaluate.harness.include=installed:examples/tasks",
        "stages.evaluate.harness.suites={own: {tasks: [stdlib_functions]}}",
    )
    store(plan, "evaluate/harness/own", metrics={"arc/acc": 0.5}, files={"shown.json": {"answers": [ENTRY]}})
    run = collect(plan)
    assert list(run.answers) == ["evaluate/harness/own"]
    page = render(plan)
    assert "Which &lt;of&gt; these?" in page and "worst by acc: document 7" in page
