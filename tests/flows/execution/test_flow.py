"""A run plans again, whatever the storage does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flows.execution import flow as pipeline
from flows.execution.runner import Runner
from flows.planning.plan import Plan
from infra.store import StorageError
from specs.profiles import Profile
from tests.flows.execution.notes import Notes

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
