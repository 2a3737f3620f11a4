"""Workers as a Slurm job array: each test with `cluster` runs on a fake of three shell scripts, and, as a
slow test, on a real Slurm."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from apertus_model.stop import StopSignal
from apertus_model.work.cluster import JobArrays, Stopped
from apertus_model.work.units import MOST_LOSSES, WorkerLost
from infra import slurm
from infra.store import Artifact
from specs.errors import StageError
from tests.apertus_model.attempts import stored_bytes, units_of, workers
from tests.apertus_model.work.asking import workers_answer_as_a_local_run
from tests.infra.fake_slurm import write_fake_slurm
from tests.infra.slurm import little_slurm
from tests.machine import slow

ROOT = Path(__file__).resolve().parents[3]
SLURM = {"executor": "slurm"}


class Cluster(NamedTuple):
    folder: Path

    def ask(self, *command: str) -> str:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout

    def tasks(self) -> dict[str, str]:
        """States by job and element, `1_0`."""
        rows = [
            row.split()
            for row in self.ask(
                "squeue", "--states=all", "--array", "--noheader", "--format=%F %K %T"
            ).splitlines()
        ]
        return {f"{job}_{element}": state for job, element, state in rows}


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.slow)])
def cluster(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Cluster]:
    folder = tmp_path / "slurm"
    monkeypatch.setattr(JobArrays, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(slurm, "VISIBLE_SECONDS", 2.0)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def use(environment: dict[str, str]) -> Cluster:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return Cluster(folder)

    if request.param == "fake":
        yield use(write_fake_slurm(folder))
        return
    with little_slurm(folder) as real:
        yield use(real.environment)


only_fake = pytest.mark.parametrize("cluster", ["fake"], indirect=True)


def _spec(documents: Path, files_per_task: int = 30) -> dict[str, Any]:
    return {
        "source": {"url": str(documents), "format": "text", "include": ["*.txt"]},
        "process": {
            "holdout": 0.2,
            "filters": [{"filter": "length", "min_characters": 200}, {"filter": "exact-duplicates"}],
        },
        "seed": 28,
        "files_per_task": files_per_task,
        "listing": [f"{i:02d}.txt" for i in range(60)],
    }


def _until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not true():
        assert time.monotonic() < end, "waited for 120 s"
        time.sleep(0.05)


def _workers(folder: Path, task: int) -> list[str]:
    """The processes that work on a task of a job array, with a store below a folder."""
    found = []
    for process in workers():
        with contextlib.suppress(OSError):  # it has ended
            variables = (process / "environ").read_bytes().split(b"\0")
            ours = bytes(folder) in (process / "cmdline").read_bytes()
            if ours and f"SLURM_ARRAY_TASK_ID={task}".encode() in variables:
                found.append(process.name)
    return found


class Stuck(threading.Thread):
    """Makes the second task wait for a writer of a pipe; when it runs, and the first is committed, `then` is
    called. If that comes to nothing, the task gets an empty document, so that the stage ends, and `mend`
    raises the error."""

    def __init__(self, bench: Any, cluster: Cluster, documents: Path, then: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self.bench, self.cluster, self.then, self.pipe = bench, cluster, then, documents / "59.txt"
        self.text = self.pipe.read_text()
        self.error: BaseException | None = None
        self.pipe.unlink()
        os.mkfifo(self.pipe)
        self.start()

    def run(self) -> None:
        try:
            _until(lambda: len(self.bench.store.names("corpus/array/units")) == 1)
            _until(lambda: self.cluster.tasks()["1_1"] == "RUNNING")
            _until(lambda: _workers(self.bench.folder, 1))  # Slurm calls a task running before it begins
            self.then()
        except BaseException as error:
            self.error = error
            self.document_is_a_file()

    def document_is_a_file(self) -> None:
        """For who opens it from now on; who waits for the pipe reads its end."""
        writer = os.open(self.pipe, os.O_RDWR)
        self.pipe.unlink()
        self.pipe.write_text(self.text)
        os.close(writer)

    def mend(self) -> None:
        """Waits for `then`."""
        self.join()
        if self.error is not None:
            raise self.error
        self.document_is_a_file()


@pytest.mark.parametrize(("jobs", "memory"), [(1, "4GiB"), slow(2, "4GiB"), slow(1, "64KiB")])
def test_workers_write_the_bytes_of_a_local_run(
    bench: Any,
    documents: Path,
    tokenizer: Artifact,
    cluster: Cluster,
    jobs: int,
    memory: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The passes after the filter tasks are submitted where their documents fill a unit of that memory; a
    worker has several of their units, since starting it takes longer than they do."""
    monkeypatch.setattr(JobArrays, "MOST", 1000 if jobs == 1 else 1)
    launch = SLURM if memory == "4GiB" else SLURM | {"workers": {"units_per_job": 20}}
    here = bench.run("corpus", "here", _spec(documents), {"tokenizer": tokenizer})
    spec = _spec(documents) | {"memory": memory}
    array = bench.run("corpus", "array", spec, {"tokenizer": tokenizer}, launch=launch)
    assert stored_bytes(array) == stored_bytes(here)
    assert array.manifest.metrics == here.manifest.metrics
    assert here.manifest.metrics["tasks"] == 2
    tasks = {"1_0", "1_1"} if jobs == 1 else {"1_0", "2_0"}
    if memory == "4GiB":
        assert cluster.tasks().keys() == tasks
    else:
        passes = {name.partition("_")[0] for name in cluster.tasks().keys() - tasks}
        assert len(passes) == len(["records", "resolve", "scatter", "files"])


def test_the_unit_of_a_killed_worker_is_submitted_again(
    bench: Any,
    documents: Path,
    tokenizer: Artifact,
    cluster: Cluster,
    capfd: pytest.CaptureFixture[str],
) -> None:
    here = bench.run("corpus", "here", _spec(documents), {"tokenizer": tokenizer})
    log = bench.folder / "scratch/corpus/array/first/work/logs/1_1.txt"

    def kill() -> None:
        assert _workers(bench.folder, 1)
        with log.open("a") as file:
            file.write("the last words\n")
        cluster.ask("scancel", "--full", "--signal=KILL", "1_1")
        _until(lambda: not _workers(bench.folder, 1))  # Slurm kills later than it answers
        stuck.document_is_a_file()

    stuck = Stuck(bench, cluster, documents, kill)
    array = bench.run("corpus", "array", _spec(documents), {"tokenizer": tokenizer}, launch=SLURM)
    assert stuck.error is None
    output = capfd.readouterr().out
    assert "1 unit is submitted again: the worker of Slurm job 1_1 (CANCELLED) ended before" in output
    assert "the last words" in output
    assert cluster.tasks().keys() >= {"1_0", "1_1"}
    (again,) = cluster.tasks().keys() - {"1_0", "1_1"}  # Slurm has numbers for elements of arrays, too
    assert again.endswith("_0")
    assert stored_bytes(array) == stored_bytes(here)
    assert bench.store.names("corpus/array/attempts/first/workers") == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["harness", "completions", "continuations"])
def test_a_model_stays_loaded_over_the_units_of_an_array(
    bench: Any, tmp_path: Path, tokenizer: Artifact, cluster: Cluster, kind: str
) -> None:
    profile = {"slurm": {"arguments": {"gres": "none"}}}  # else a model has a GPU
    workers_answer_as_a_local_run(bench, tmp_path, tokenizer, kind, SLURM, profile)
    assert len(units_of(bench, f"{kind}/workers", "first")) > 2
    assert cluster.tasks().keys() == {"1_0", "1_1"}  # three units, two a worker


def test_a_stop_request_cancels_the_array_and_keeps_what_is_committed(
    bench: Any, documents: Path, tokenizer: Artifact, cluster: Cluster
) -> None:
    stop = StopSignal()
    progress = bench.folder / "progress.jsonl"

    def ask() -> None:
        _until(
            lambda: (
                '"done":1.0,"total":2.0,"unit":"units","metrics":{"running":1.0,"queued":0.0}'
                in progress.read_text()
            )
        )
        stop.request("SIGTERM")

    stuck = Stuck(bench, cluster, documents, ask)
    with pytest.raises(Stopped, match=r"stopped \(SIGTERM\): the Slurm jobs 1 were cancelled"):
        bench.run("corpus", "array", _spec(documents), {"tokenizer": tokenizer}, launch=SLURM, stop=stop)
    _until(lambda: cluster.tasks()["1_1"] == "CANCELLED")
    stuck.mend()
    assert units_of(bench, "corpus/array", "first") == ["documents-00000000-00000030"]


@only_fake
def test_bad_documents_are_reported_as_on_one_machine(
    bench: Any, tmp_path: Path, tokenizer: Artifact, cluster: Cluster
) -> None:
    folder = tmp_path / "lines"
    folder.mkdir()
    (folder / "a.jsonl").write_text(json.dumps({"body": "text"}) + "\n")
    spec = {"source": {"url": str(folder), "format": "jsonl"}, "process": {}, "seed": 1, "files_per_task": 1}
    with pytest.raises(StageError, match=r"a\.jsonl', line 1: no column 'text'; there are body"):
        bench.run("corpus", "array", spec, {"tokenizer": tokenizer}, launch=SLURM)


@only_fake
def test_the_error_for_nodes_without_the_folder_names_the_fix(
    bench: Any, documents: Path, tokenizer: Artifact, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SLURM_IS_BLIND", "1")
    monkeypatch.setattr(slurm, "VISIBLE_SECONDS", 0.2)
    with pytest.raises(WorkerLost, match=r"neither units nor a log.*APERTUS_SCRATCH, --store"):
        bench.run("corpus", "array", _spec(documents), {"tokenizer": tokenizer}, launch=SLURM)
    assert len({name.partition("_")[0] for name in cluster.tasks()}) == MOST_LOSSES


@only_fake
def test_conversations_are_shared_by_workers_too(
    bench: Any, tmp_path: Path, tokenizer: Artifact, cluster: Cluster
) -> None:
    folder = tmp_path / "chat"
    folder.mkdir()
    for i in range(20):
        turns = [{"role": "user", "content": f"number {i}?"}, {"role": "assistant", "content": f"{i}!"}]
        (folder / f"{i:02d}.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    spec = {
        "source": {"url": str(folder), "format": "chat"},
        "process": {"holdout": 0.3},
        "seed": 28,
        "files_per_task": 10,
    }
    here = bench.run("conversations", "here", spec, {"tokenizer": tokenizer})
    array = bench.run("conversations", "array", spec, {"tokenizer": tokenizer}, launch=SLURM)
    assert stored_bytes(array) == stored_bytes(here)
    assert array.manifest.metrics == here.manifest.metrics


@only_fake
def test_what_recipe_and_profile_ask_for_reaches_sbatch(
    bench: Any, documents: Path, tokenizer: Artifact, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SLURM_IS_BLIND", "1")
    monkeypatch.setattr(slurm, "VISIBLE_SECONDS", 0.0)
    asked = {"time_limit": "90s", "cpus": 4, "memory": "8G", "units_per_job": 7, "count": 3}
    profile = {
        "slurm": {
            "partition": "long",
            "arguments": {"account": "a123", "exclusive": True, "nice": 5, "contiguous": False},
        }
    }
    launch = {**SLURM, "workers": asked}
    with pytest.raises(WorkerLost):
        bench.run(
            "corpus", "array", _spec(documents, 1), {"tokenizer": tokenizer}, launch=launch, profile=profile
        )
    words = (cluster.folder / "jobs/1/arguments.txt").read_text().split()
    assert {
        "--partition=long",
        "--time=2",
        "--cpus-per-task=4",
        "--mem=8G",
        "--account=a123",
        "--exclusive",
        "--nice=5",
    } <= set(words)
    assert "--array=0-8%3" in words  # 60 units
    assert not [word for word in words if "contiguous" in word]


def test_a_machine_without_slurm_is_an_error_with_the_missing_command(
    bench: Any, documents: Path, tokenizer: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(StageError, match=r"no 'sbatch'. Fix: .*executor: local"):
        bench.run("corpus", "array", _spec(documents), {"tokenizer": tokenizer}, launch=SLURM)


def test_a_worker_has_the_gpus_of_a_model_unless_the_profile_says_which(bench: Any, tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []
    launch = {"executor": "slurm", "processes": 4, "parallel": {"tp": 4}}
    for arguments in {}, {"gpus-per-node": 4}:
        profile = {"slurm": {"arguments": arguments, "cpus_per_task": 72}}
        job = bench.job("completions", "c", {}, {}, attempt="a", workers=1, launch=launch, profile=profile)
        job = job.model_copy(update={"gpus": 4})
        (Path(job.scratch) / "work").mkdir(parents=True, exist_ok=True)
        jobs = JobArrays(job)
        jobs._jobs.submit = lambda script, options: (asked.append(dict(options)), "7")[1]  # type: ignore[method-assign]
        jobs.submit(0, "shares.json", 2)
    assert [options.get("gpus-per-task") for options in asked] == [4, None]
    assert [options["cpus-per-task"] for options in asked] == [72, 72]
