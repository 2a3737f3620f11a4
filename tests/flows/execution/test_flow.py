"""A run plans again, whatever the storage does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.execution import flow as pipeline
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
        (pipeline.WorkerLost("the worker is gone"), "interrupted", "the worker is gone"),
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


def test_a_deployed_run_has_the_name_of_its_deployment_and_not_of_its_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PREFECT__RUNTIME__DEPLOYMENT__NAME", "kites")
    monkeypatch.setenv("PREFECT__RUNTIME__FLOW_RUN__ID", "3f2a9c00-0000-4000-8000-000000000000")
    name = pipeline.pipeline.flow_run_name
    assert callable(name) and name() == "kites-3f2a"
