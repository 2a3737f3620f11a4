"""Ranks are rehearsed by forks of one process, which has the imports."""

from __future__ import annotations

import io
import os
import signal
from typing import IO, Any

import pytest

from apertus_model.rehearsal import fake_cuda
from apertus_model.rehearsal.records import RankTask
from flows.execution import rehearsal
from flows.execution.rehearsal import run_ranks
from infra.launchers.warm import ForkedStage, StageServer
from tests.apertus_model.harness import segment

pytestmark = pytest.mark.skipif(
    not fake_cuda.possible(), reason=f"no {fake_cuda.COMPILER}, which compiles the fake CUDA"
)


def task(rank: int = 0, **changes: Any) -> RankTask:
    fields = segment(global_batch_size=4, end_step=1).model_dump(mode="json")
    facts = {"gpu": "H100", "gpus_per_node": 8, "world_size": 2} | changes
    return RankTask(kind="pretrain", segment=fields, rank=rank, **facts)


def test_a_rank_counts_the_same_whatever_was_rehearsed_before() -> None:
    first, _, again = (run_ranks([task(rank)])[0] for rank in (0, 1, 0))
    assert first.failure is None and first.rehearsed is not None
    assert again == first


@pytest.mark.parametrize("cores", [1, 2])
def test_ranks_are_reported_in_their_order_however_many_run_at_a_time(
    cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    begun: list[int] = []
    reports = run_ranks([task(rank) for rank in (1, 0, 1)], begun.append)
    assert begun == [report.rank for report in reports] == [1, 0, 1]
    assert all(report.rehearsed is not None for report in reports)


@pytest.mark.slow  # it starts another server
def test_an_error_before_the_step_is_reported_by_the_rank() -> None:
    (report,) = run_ranks([task(gpu="H1000")])
    assert report.failure is not None and report.failure.error == "KeyError: 'H1000'"
    (report,) = run_ranks([task()])
    assert report.failure is None


def test_a_process_that_does_not_start_is_a_failure_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "SERVER", "apertus_model.rehearsal.absent")
    (report,) = run_ranks([task()])
    assert report.failure is not None
    assert report.failure.error == (
        f"it did not start, by python -m {rehearsal.SERVER} cuda H100: the stage server has ended"
    )


def test_an_interrupted_rehearsal_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    started: list[ForkedStage] = []
    pipes: list[IO[bytes]] = []  # which stay open

    class Interrupted(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise KeyboardInterrupt

    def start(server: StageServer, *program: Any, seconds: float) -> ForkedStage:
        stage = begin(server, *program, seconds=seconds)
        pipes.append(stage.stdout)
        stage.stdout = Interrupted()
        started.append(stage)
        return stage

    begin = StageServer.start
    monkeypatch.setattr(StageServer, "start", start)
    with pytest.raises(KeyboardInterrupt):
        run_ranks([task(0), task(1)])
    assert [stage.wait() for stage in started] == [-signal.SIGKILL] * 2
