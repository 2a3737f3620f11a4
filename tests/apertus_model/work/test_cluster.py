"""The units of a stage on a cluster that is pretended in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from apertus_model.progress import Progress, UnitProgress
from apertus_model.stop import StopSignal
from apertus_model.work.cluster import Stopped, run_on_cluster
from apertus_model.work.units import MOST_LOSSES, Shares, WorkerLost, failure_file
from infra.store import Attempt
from infra.store.documents import to_json
from specs.errors import StageError
from specs.job import Failure


class Pretended:
    """Jobs whose workers end at once: each commits what `commits` leaves of its share."""

    MOST, POLL_SECONDS, cpus = 2, 0.0, 1

    def __init__(self, attempt: Attempt, commits: Callable[[list[str]], list[str]]) -> None:
        self.attempt, self.commits = attempt, commits
        self.submitted: list[list[list[str]]] = []
        self.states_of: dict[str, str] = {}
        self.silent = 0  # times that it does not answer
        self.ended: list[bool] = []

    def submit(self, number: int, shares: str, workers: int) -> None:
        stated = Shares.model_validate_json(self.attempt.store.read_bytes(shares))
        assert len(stated.shares) == workers <= self.MOST
        assert self.attempt.store.exists(stated.alive)
        self.submitted.append(stated.shares)
        for index, share in enumerate(stated.shares):
            done = self.commits(share)
            for key in done:
                self.attempt.commit_unit(key)
            self.states_of[f"{number}-{index}"] = "DONE" if done == share else "LOST"

    def states(self) -> dict[str, str] | None:
        self.silent -= 1
        return None if self.silent >= 0 else self.states_of

    def over(self, worker: str, state: str) -> bool:
        return True

    def explanation(self, worker: str, state: str) -> str:
        return f"worker {worker} is {state}"

    def end(self, *, finished: bool) -> str:
        self.ended.append(finished)
        return "the jobs"


@pytest.fixture
def attempt(bench: Any) -> Attempt:
    launch = {"workers": {"units_per_job": 3}}
    return Attempt(bench.job("corpus", "c", launch=launch))


def _run(jobs: Pretended, keys: list[str], stop: StopSignal | None = None) -> list[str]:
    progress = UnitProgress(Progress(None), len(keys), len(keys))
    return list(run_on_cluster(jobs, keys, jobs.attempt, stop or StopSignal(), progress))


def test_units_are_divided_among_workers_and_those_among_jobs(attempt: Attempt) -> None:
    jobs = Pretended(attempt, lambda share: share)
    jobs.silent = 3
    keys = list("abcdefgh")
    assert _run(jobs, keys) == keys
    assert jobs.submitted == [[["a", "b", "c"], ["d", "e", "f"]], [["g", "h"]]]
    assert jobs.ended == [True]
    assert attempt.store.names(attempt.folder("workers")) == []


def test_a_lost_worker_loses_only_what_it_has_not_committed(
    attempt: Attempt, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = Pretended(attempt, lambda share: share[:2])  # each worker ends after two units
    assert sorted(_run(jobs, list("abcdef"))) == list("abcdef")
    assert jobs.submitted == [[["a", "b", "c"], ["d", "e", "f"]], [["c", "f"]]]
    assert "1 unit is submitted again: worker 0-1 is LOST" in capsys.readouterr().out


def test_a_unit_that_no_worker_finishes_is_an_error_after_the_others_are_committed(attempt: Attempt) -> None:
    jobs = Pretended(attempt, lambda share: [key for key in share if key != "b"][: share.index("b")]
                     if "b" in share else share)  # fmt: skip
    with pytest.raises(WorkerLost, match=r"worker \d-0 is LOST"):
        _run(jobs, list("abcd"))
    assert len(jobs.submitted) == MOST_LOSSES
    assert [attempt.unit(key) is not None for key in "abcd"] == [True, False, False, True]
    assert jobs.ended == [False]


def test_an_error_for_users_ends_the_stage_at_once(attempt: Attempt) -> None:
    def commits(share: list[str]) -> list[str]:
        told = Failure(message="no column 'text'")
        attempt.store.overwrite(failure_file(attempt.folder("workers"), "0-0"), to_json(told))
        return []

    jobs = Pretended(attempt, commits)
    with pytest.raises(StageError, match="no column 'text'"):
        _run(jobs, list("ab"))
    assert (len(jobs.submitted), jobs.ended) == (1, [False])
    assert attempt.store.names(attempt.folder("workers/failures")) == []


def test_a_stage_that_is_told_to_stop_leaves_no_job(attempt: Attempt) -> None:
    stop = StopSignal()

    def commits(share: list[str]) -> list[str]:
        stop.request("SIGTERM")
        return share[:1]

    jobs = Pretended(attempt, commits)
    with pytest.raises(Stopped, match=r"stopped \(SIGTERM\): the jobs were cancelled"):
        _run(jobs, list("ab"), stop)
    assert jobs.ended == [False] and attempt.unit("a") is not None


def test_nothing_is_submitted_where_nothing_is_left(attempt: Attempt) -> None:
    jobs = Pretended(attempt, lambda share: share)
    assert _run(jobs, []) == [] == jobs.submitted == jobs.ended
