"""What Prefect's pages show, and that what cannot be shown ends nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from flows.execution import prefect_pages as pages
from flows.planning.plan import Plan
from specs.job import ProgressRow
from tests.flows.conftest import finish

Planned = Callable[..., Plan]
PASSWORD = "s3cret-in-an-address"


def test_a_server_that_is_away_ends_no_stage(
    planned: Planned, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def away(**arguments: Any) -> None:
        raise ConnectionError(f"all attempts to reach https://me:{PASSWORD}@prefect.example failed")

    for name in (
        "create_progress_artifact",
        "update_progress_artifact",
        "create_table_artifact",
        "create_markdown_artifact",
    ):
        monkeypatch.setattr(pages, name, away)
    plan = planned()
    finish(plan, "tokenizer")
    step = planned().steps["tokenizer"]
    with caplog.at_level(logging.WARNING):
        now = iter((0.0, 6.0, 6.0, 12.0))
        bar = pages.ProgressBar("small", "tokenizer", clock=lambda: next(now))
        for text in ("half of it", "still half of it"):  # the second is not tried
            bar.update(ProgressRow(done=1, total=2, unit="steps"), text)
        bar.finish()
        pages.publish_results(step, plan)
        pages.publish_run(plan, "reports/small.html", {"tokenizer": "it is too small"})
    warnings = [record.getMessage().partition(" is not on Prefect's pages")[0] for record in caplog.records]
    assert warnings == ["the progress of tokenizer", "the table of tokenizer", "the page of the run"]
    assert PASSWORD not in caplog.text


def test_progress_is_reported_every_few_seconds_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[float, str]] = []
    made = []

    def tell(**given: Any) -> str:
        told.append((given["progress"], given["description"]))
        return "the-id"

    monkeypatch.setattr(pages, "create_progress_artifact", lambda **given: made.append(1) or tell(**given))
    monkeypatch.setattr(pages, "update_progress_artifact", tell)
    now = [0.0]
    short = pages.ProgressBar("small", "main", clock=lambda: now[0])
    short.update(ProgressRow(done=1, total=1, unit="steps"), "step 1")
    short.finish()
    assert told == []  # nobody sees it
    bar = pages.ProgressBar("small", "pretrain/1", clock=lambda: now[0])
    for seconds, done in ((1, 1), (6, 2), (7, 3), (8, 4)):
        now[0] = seconds
        bar.update(ProgressRow(done=done, total=4, unit="steps"), f"step {done}")
    assert told == [(50.0, "step 2"), (100.0, "step 4")]
    bar.finish()
    assert told[-1] == (100.0, "finished") and len(made) == 1
