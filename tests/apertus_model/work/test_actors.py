"""Workers as actors of a Ray cluster: the bits of a local run, whatever becomes of workers and nodes."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from apertus_model.progress import Progress, UnitProgress
from apertus_model.stop import StopSignal
from apertus_model.work import actors
from apertus_model.work.actors import run_on_ray
from apertus_model.work.cluster import Stopped
from apertus_model.work.units import MOST_LOSSES, WorkerLost, units_of
from infra.store import Artifact, Attempt
from specs.errors import StageError
from specs.job import Job
from specs.launch import Workers
from tests.apertus_model.corpora import corpus_spec
from tests.apertus_model.work.asking import workers_answer_as_a_local_run
from tests.infra.ray import actors as actors_of
from tests.infra.ray import no_actor_is_left

pytest.importorskip("ray", reason="the extra `ray` is not installed")


@pytest.fixture
def profile(ray_address: str) -> dict[str, Any]:
    return {"ray": {"address": ray_address, "gpus": False}}


@pytest.mark.parametrize("kind", ["completions", "continuations"])
def test_actors_answer_as_a_local_run(
    bench: Any, tmp_path: Path, tokenizer: Artifact, profile: dict[str, Any], kind: str
) -> None:
    workers_answer_as_a_local_run(bench, tmp_path, tokenizer, kind, {"executor": "ray"}, profile)


def _job(bench: Any, documents: Path, tokenizer: Artifact, profile: dict[str, Any]) -> Job:
    """A corpus of sixty files in two units."""
    spec = corpus_spec(documents, files_per_task=30)
    spec["listing"] = [f"{number:02d}.txt" for number in range(60)]
    inputs = {"tokenizer": tokenizer}
    job: Job = bench.job("corpus", "c", spec, inputs, launch={"executor": "ray"}, profile=profile)
    return job


KEYS = ["documents-00000000-00000030", "documents-00000030-00000060"]


def _committed(job: Job, stop: StopSignal | None = None) -> list[str]:
    attempt = Attempt(job)
    progress = UnitProgress(Progress(job.progress), len(KEYS), len(KEYS))
    return [key for key in run_on_ray(job, list(KEYS), stop or StopSignal(), progress) if attempt.unit(key)]


def _actors() -> list[int]:
    return actors_of("UnitWorker")


def _waits_for_a_writer(pid: int) -> bool:
    file = Path(f"/proc/{pid}/wchan")
    return file.exists() and file.read_text() == "wait_for_partner"


@pytest.fixture
def pipe(documents: Path) -> Path:
    """A file of the second unit that nobody writes: its workers wait."""
    file = documents / "59.txt"
    file.unlink()
    os.mkfifo(file)
    return file


@contextlib.contextmanager
def _meanwhile(act: Callable[[], bool]) -> Iterator[None]:
    """A context in which a thread acts, until that returns true."""
    over = threading.Event()

    def again() -> None:
        while not act() and not over.wait(0.1):
            pass

    thread = threading.Thread(target=again, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_worker_that_still_waits_for_a_place_is_not_started_when_no_unit_is_left(
    bench: Any,
    documents: Path,
    tokenizer: Artifact,
    profile: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    had_a_place = list[Any]()
    hand_out = actors._Actors._hand_out

    def counted(self: actors._Actors, actor: Any) -> None:
        had_a_place.append(actor)
        hand_out(self, actor)

    monkeypatch.setattr(actors._Actors, "_hand_out", counted)
    job = _job(bench, documents, tokenizer, profile)
    job = job.model_copy(update={"spec": job.spec | {"files_per_task": 10}})
    keys, progress = list(units_of("documents", 60, 10)), UnitProgress(Progress(None), 6, 6)
    assert sorted(run_on_ray(job, keys, StopSignal(), progress)) == keys
    assert len(set(had_a_place)) < len(keys)  # as many workers were asked for; two have a place


def test_the_unit_of_a_killed_worker_is_begun_again(
    bench: Any,
    documents: Path,
    tokenizer: Artifact,
    profile: dict[str, Any],
    pipe: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def kill() -> bool:
        """Kills the worker that waits, and writes for the next one."""
        waiting = [pid for pid in _actors() if _waits_for_a_writer(pid)]
        for pid in waiting:
            pipe.rename(pipe.with_suffix(".pipe"))
            pipe.write_text("A text that can be read.")
            os.kill(pid, signal.SIGKILL)
        return bool(waiting)

    job = _job(bench, documents, tokenizer, profile)
    with _meanwhile(kill):
        assert sorted(_committed(job)) == KEYS
    assert f"unit {KEYS[1]} is begun again: ActorDiedError" in capfd.readouterr().out
    assert no_actor_is_left("UnitWorker")


def test_a_unit_that_takes_its_workers_with_it_is_an_error_in_the_end(
    bench: Any, documents: Path, tokenizer: Artifact, profile: dict[str, Any], pipe: Path
) -> None:
    killed = set[int]()

    def kill() -> bool:
        for pid in {pid for pid in _actors() if _waits_for_a_writer(pid)} - killed:
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        return len(killed) == MOST_LOSSES

    with _meanwhile(kill), pytest.raises(WorkerLost, match="ActorDiedError"):
        _committed(_job(bench, documents, tokenizer, profile))
    assert len(killed) == MOST_LOSSES
    assert no_actor_is_left("UnitWorker")


def test_an_error_for_users_ends_the_stage_with_its_words(
    bench: Any, tmp_path: Path, tokenizer: Artifact, profile: dict[str, Any]
) -> None:
    folder = tmp_path / "lines"
    folder.mkdir()
    for name in "ab":
        (folder / f"{name}.jsonl").write_text('{"body": "text"}\n')
    spec = {"source": {"url": str(folder), "format": "jsonl"}, "process": {}, "seed": 1, "files_per_task": 1}
    options: dict[str, Any] = {"launch": {"executor": "ray"}, "profile": profile}
    with pytest.raises(StageError, match=r"\.jsonl', line 1: no column 'text'; there are body"):
        bench.run("corpus", "c", spec, {"tokenizer": tokenizer}, **options)
    assert no_actor_is_left("UnitWorker")


def test_a_stage_that_is_stopped_leaves_no_worker(
    bench: Any, documents: Path, tokenizer: Artifact, profile: dict[str, Any], pipe: Path
) -> None:
    stop = StopSignal()

    def ask() -> bool:
        if waits := any(map(_waits_for_a_writer, _actors())):
            stop.request("by a test")
        return waits

    with _meanwhile(ask), pytest.raises(Stopped, match="by a test"):
        _committed(_job(bench, documents, tokenizer, profile), stop)
    assert no_actor_is_left("UnitWorker")


def test_what_no_node_can_give_is_said(
    bench: Any,
    documents: Path,
    tokenizer: Artifact,
    profile: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(actors, "PATIENCE_SECONDS", 0.0)
    stop, said = StopSignal(), list[str]()

    def ask() -> bool:
        said.append(capfd.readouterr().out)
        if told := "no worker has a place yet" in said[-1]:
            stop.request("by a test")
        return told

    job = _job(bench, documents, tokenizer, profile)
    workers = job.launch.model_copy(update={"workers": Workers(cpus=64, memory="2G")})
    with _meanwhile(ask), pytest.raises(Stopped):
        _committed(job.model_copy(update={"launch": workers}), stop)
    assert "waiting for a worker with 64 CPUs, 0 GPUs, 2.0 GiB" in said[-1]
    assert "has 1 CPUs, 0 GPUs" in said[-1]
