"""A run plans again, whatever the storage does."""

from __future__ import annotations

import contextlib
import logging
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect.exceptions import CancelledRun
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.execution import flow as pipeline
from flows.execution import interrupts
from flows.execution.runner import Runner
from flows.planning.plan import Plan
from infra.store import StorageError, Store, runs
from specs.errors import SpecError
from specs.profiles import Profile
from tests.flows.execution.notes import Notes
from tests.flows.finished import read_json
from tests.recipes import write_recipe

Planned = Callable[..., Plan]


def test_planning_again_waits_for_a_storage_that_is_away(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a part has finished, when others of the run may be training for days."""
    at_once = ("retries.attempts=2", "retries.backoff=0s")
    plan, notes = planned(*at_once), Notes()
    Runner(plan, notes).prepare()
    session = pipeline.Session(pipeline.Run(plan, notes, Profile()), set(plan.pipeline.stages))
    session.begun = {"tokenizer": plan.steps["tokenizer"]}
    answers: list[Plan | StorageError] = [StorageError("the storage failed 7 times")] * 2

    def away(*arguments: Any) -> Plan:
        if isinstance(answer := answers.pop(0), StorageError):
            raise answer
        return answer

    monkeypatch.setattr(pipeline, "make", away)
    answers.append(again := planned(*at_once))
    pipeline._settle(session, "tokenizer")
    assert session.plan is again
    assert (
        len(notes.notes) == 2
        and "the next parts could not be planned: the storage failed 7 times" in notes.notes[0]
    )
    answers += [StorageError("the storage failed 7 times")] * 3
    with pytest.raises(StorageError):
        pipeline._settle(session, "tokenizer")
    assert not answers


@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        (None, "finished", "--until corpus"),
        (
            pipeline.PipelineFailed(
                {"evaluate": "gate on perplexity: 9 is above the allowed 8", "export": "no"}
            ),
            "failed",
            "evaluate: gate on perplexity: 9 is above the allowed 8\nexport: no",
        ),
        (SpecError.of((), "too little data"), "failed", "too little data"),
        (StorageError("the storage failed 7 times"), "failed", "the storage failed 7 times"),
        (pipeline.DeploymentWorkerLost("the worker is gone"), "interrupted", "the worker is gone"),
        (pipeline.PipelineInterrupted("the time limit"), "interrupted", "the time limit"),
        (KeyboardInterrupt("Ctrl-C"), "interrupted", "Ctrl-C"),
        (KeyboardInterrupt(), "interrupted", "Ctrl-C"),
    ],
)
def test_a_run_records_how_it_ended_and_why(
    planned: Planned,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException | None,
    outcome: str,
    reason: str,
) -> None:
    def walk(session: pipeline.Session) -> None:
        assert read_json("runs", "--store", store.url, "--json")["runs"][0]["seconds"] is None
        if error is not None:
            raise error

    monkeypatch.setattr(pipeline, "walk", walk)
    run = pipeline.Run(planned(), Notes(), Profile())
    if error is None:
        pipeline.run_plan(run, "corpus", None)
    else:
        with pytest.raises(type(error)):
            pipeline.run_plan(run, None, None)
    end = runs.last(store, "tiny").end
    assert end is not None and (end.outcome, end.reason) == (outcome, reason)
    assert end.unfinished == (["evaluate", "export"] if isinstance(error, pipeline.PipelineFailed) else [])
    assert 0 <= end.seconds < 60
    (row,) = read_json("runs", "--store", store.url, "--json")["runs"]
    assert (row["outcome"], row["reason"], row["started"]) == (outcome, reason, end.started)


def test_a_deployed_run_refuses_a_column_that_a_source_lacks_before_anything_starts(
    tmp_path: Path, store: Store
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"body": "' + "a text " * 20_000 + '"}\n')
    rows = f'sources.notes={{url: "{tmp_path}", format: jsonl, include: ["*.jsonl"]}}'
    with pytest.raises(SpecError, match=r"sources.notes.text_column: .*no column 'text'; there are body"):
        pipeline.pipeline.fn(str(write_recipe(tmp_path)), [rows], store=store.url)
    assert runs.names(store) == []


@pytest.fixture
def ends(planned: Planned, monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], Any]:
    """Runs the flow without Prefect, in which the walk ends with an error. What the flow returns."""

    def ends(error: BaseException) -> Any:
        def run_plan(*arguments: Any) -> None:
            raise error

        monkeypatch.setattr(pipeline, "run_plan", run_plan)
        monkeypatch.setattr(logging, "setLogRecordFactory", lambda factory: None)
        token = pipeline._run.set(pipeline.Run(planned(), Notes(), Profile()))
        try:
            return pipeline.pipeline.fn(spec="tiny.yaml")
        finally:
            pipeline._run.reset(token)

    return ends


def test_a_run_is_cancelled_when_a_person_has_stopped_it_and_has_crashed_when_anything_else_has(
    ends: Callable[[BaseException], Any],
) -> None:
    assert ends(KeyboardInterrupt("Ctrl-C")).is_cancelled()
    assert ends(pipeline.DeploymentWorkerLost("the worker is gone")).is_crashed()
    for error in (KeyboardInterrupt("SIGTERM"), KeyboardInterrupt(), pipeline.PipelineInterrupted("TERM")):
        with pytest.raises(type(error)):  # of which Prefect makes Crashed
            ends(error)


def test_the_command_line_ends_as_by_ctrl_c_when_the_run_is_cancelled(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cancelled(**parameters: Any) -> None:
        raise CancelledRun("stopped")

    monkeypatch.setattr(pipeline, "pipeline", cancelled)
    monkeypatch.setattr(interrupts, "_heard", ["Ctrl-C"])
    with pytest.raises(KeyboardInterrupt, match="Ctrl-C"):
        pipeline.run_here(planned(), Notes(), Profile(), spec="tiny.yaml")


@pytest.mark.parametrize("url", [None, "http://127.0.0.1:9/api"])
def test_a_run_has_a_guard_if_its_server_outlives_it(
    url: str | None, ends: Callable[[BaseException], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    guards: list[str] = []
    monkeypatch.setattr(pipeline, "guard", guards.append)
    with temporary_settings({PREFECT_API_URL: url}):
        ends(KeyboardInterrupt("Ctrl-C"))
    assert len(guards) == (url is not None)


@pytest.mark.parametrize(
    ("error", "ends"),
    [(None, True), (pipeline.PipelineFailed({"export": "no"}), True), (KeyboardInterrupt("Ctrl-C"), False)],
)
def test_the_guard_ends_with_the_run_when_its_end_has_been_reported(
    planned: Planned, monkeypatch: pytest.MonkeyPatch, error: BaseException | None, ends: bool
) -> None:
    guard = subprocess.Popen(["sleep", "100"])

    def run(**parameters: Any) -> None:
        pipeline._run.get().guard = guard
        if error is not None:
            raise error

    monkeypatch.setattr(pipeline, "pipeline", run)
    with contextlib.suppress(type(error) if error is not None else OSError):
        pipeline.run_here(planned(), Notes(), Profile(), spec="tiny.yaml")
    ended = guard.poll if not ends else lambda: guard.wait(60)
    assert (ended() is not None) == ends
    guard.kill()
    guard.wait()


def test_a_deployed_run_has_the_name_of_its_deployment_and_not_of_its_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PREFECT__RUNTIME__DEPLOYMENT__NAME", "kites")
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", "3f2a9c00-0000-4000-8000-000000000000")
    name = pipeline.pipeline.flow_run_name
    assert callable(name) and name() == "kites-3f2a"
