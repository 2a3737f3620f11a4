"""Runs that are told to stop by a signal, or by the clock: 130, nothing left behind, and a checkpoint
where a step was made."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.store import Artifact, Store
from tests.e2e.conftest import (
    SMOKE,
    Run,
    command_line,
    cooling_run,
    ended_as_interrupted,
    every_process,
    group_twice,
)
from tests.e2e.test_smoke import plan_of, result

LONGER = "stages.cooldown.budget=500 steps"


@pytest.fixture
def cooling(
    finished: Path, home: Path, tmp_path: Path, api: str, request: pytest.FixtureRequest
) -> tuple[Run, Artifact]:
    """A run that has everything but a long cooldown, which it begins; the parameter is its number of
    ranks."""
    store = tmp_path / "store"
    processes = getattr(request, "param", 1)
    run = cooling_run(finished, store, home, LONGER, processes=processes, api=api)
    return run, Artifact(Store.open(str(store)), plan_of(store, LONGER).graph.nodes["cooldown"].path)


def ranks(run: Run) -> list[int]:
    """Processes of the stage below torchrun."""
    return [pid for pid in run.stage_processes() if "torch.distributed.run" not in command_line(pid)]


@pytest.mark.slow
def test_sigusr1_in_the_middle_of_training_commits_a_checkpoint(cooling: tuple[Run, Artifact]) -> None:
    run, annealing = cooling
    run.wait_for(lambda: bool(annealing.checkpoint_steps()))
    ended_as_interrupted(run, lambda: os.kill(run.process.pid, signal.SIGUSR1))
    last = annealing.checkpoint_steps()[-1]
    assert last < 500
    annealing.checkpoint(last).check()


@pytest.mark.slow
def test_sigusr1_while_a_stage_starts_ends_it_at_once(cooling: tuple[Run, Artifact]) -> None:
    run, annealing = cooling
    run.wait_for(lambda: bool(ranks(run)))
    ended_as_interrupted(run, lambda: os.kill(run.process.pid, signal.SIGUSR1))
    assert annealing.checkpoint_steps() == []


def server_is_there(run: Run) -> bool:
    return any("uvicorn" in command_line(pid) for pid in run.processes())


def test_a_signal_to_the_process_group_during_server_start_ends_the_run(home: Path, tmp_path: Path) -> None:
    run = Run(home, "run", SMOKE, "--store", str(tmp_path / "store"))
    run.wait_for(lambda: server_is_there(run))
    time.sleep(0.5)  # it takes several seconds
    ended_as_interrupted(run, lambda: group_twice(run, signal.SIGTERM))


@pytest.mark.slow
def test_a_part_without_checkpoints_ends_with_its_group(finished: Path, home: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(finished, store)
    shutil.rmtree(store / "evaluate")
    run = Run(home, "run", SMOKE, "--store", str(store))
    run.wait_for(lambda: bool(run.stage_processes()))
    ended_as_interrupted(run, lambda: os.killpg(run.process.pid, signal.SIGHUP))
    assert "evaluate was interrupted: the run was stopped by SIGHUP" in run.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "tell"),
    [(signal.SIGTERM, group_twice), (signal.SIGTERM, every_process), (signal.SIGHUP, every_process)],
    ids=["SIGTERM, group", "SIGTERM, all", "SIGHUP, all"],
)
def test_a_run_that_is_stopped_at_every_stage_of_its_life_ends_in_the_same_bits(
    finished: Path,
    home: Path,
    tmp_path: Path,
    number: signal.Signals,
    tell: Callable[[Run, signal.Signals], None],
) -> None:
    store = tmp_path / "store"
    shutil.copytree(finished, store)
    for kind in ("cooldown", "evaluate", "export", "runs"):
        shutil.rmtree(store / kind)
    annealing = Artifact(Store.open(str(store)), plan_of(store).graph.nodes["cooldown"].path)
    moments: list[Callable[[Run], bool]] = [
        lambda run: "starting Prefect" in run.text,
        server_is_there,
        lambda run: "kept tokenizer" in run.text,
        lambda run: bool(ranks(run)),
        lambda run: bool(annealing.checkpoint_steps()),
        lambda run: any("apertus-evaluate-" in job for job in run.stages_running()),
    ]
    for moment in moments:
        run = Run(home, "run", SMOKE, "--store", str(store))
        run.wait_for(lambda moment=moment, run=run: moment(run))  # type: ignore[misc]
        ended_as_interrupted(run, lambda run=run: tell(run, number))  # type: ignore[misc]
        for step in annealing.checkpoint_steps():
            annealing.checkpoint(step).check()
    run = Run(home, "run", SMOKE, "--store", str(store))
    assert run.wait() == 0, run.text
    assert result(store) == result(finished)


@pytest.mark.slow
def test_a_run_that_is_killed_while_its_server_starts_leaves_none_behind(home: Path, tmp_path: Path) -> None:
    run = Run(home, "run", SMOKE, "--store", str(tmp_path / "store"))
    run.wait_for(lambda: server_is_there(run))
    time.sleep(0.5)  # it takes several seconds
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait()
    assert run.no_process_is_left(3)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [None, 0.0, 3.0])
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_processes_of_a_training_stage_interrupts_the_run(
    cooling: tuple[Run, Artifact], number: signal.Signals, seconds: float | None
) -> None:
    """In training, and so many seconds after the first rank was there."""
    run, annealing = cooling
    run.wait_for(lambda: bool(ranks(run)) if seconds is not None else bool(annealing.checkpoint_steps()))
    time.sleep(seconds or 0)
    ended_as_interrupted(run, lambda: [os.kill(pid, number) for pid in run.stage_processes()])
    assert f"cooldown was interrupted: {number.name}" in run.text


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [1.0, 4.0])
@pytest.mark.parametrize("cooling", [2], indirect=True)  # a single rank runs without torchrun
def test_ranks_do_not_wait_for_a_torchrun_that_is_gone(cooling: tuple[Run, Artifact], seconds: float) -> None:
    run, _ = cooling
    run.wait_for(lambda: bool(ranks(run)))
    time.sleep(seconds)
    stage = set(ranks(run))
    (torchrun,) = {*run.stage_processes()} - stage
    os.kill(torchrun, signal.SIGKILL)
    run.wait_for(lambda: not stage & {*run.processes()}, timeout=10)
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.wait(20) == 130


@pytest.mark.slow
def test_a_stage_whose_job_is_about_to_end_interrupts_the_run(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # an hour before it is over when training begins
    monkeypatch.setenv("APERTUS_JOB_END", str(time.time() + 3600))
    run = Run(
        home,
        "run",
        SMOKE,
        "--store",
        str(home / "ending"),
        "--until",
        "pretrain",
        "--set",
        "launch.stop_before_end=1h",
    )
    assert run.wait(280) == 130, run.text
    assert "was interrupted: the job ends in 3600 s" in run.text
    assert "the same command resumes from them" in run.text
    assert "Traceback" not in run.text
    assert run.no_process_is_left(20)
