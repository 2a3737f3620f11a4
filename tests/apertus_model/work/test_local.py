"""A pool of workers: the same bits for any number of them, killed or not; each with its own GPUs; none of
them outlives its stage."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from apertus_model.work import local
from apertus_model.work.units import MOST_LOSSES, WorkerLost
from infra.store import Artifact, Attempt
from specs.errors import StageError
from specs.job import Job
from tests.apertus_model.attempts import children, stored_bytes
from tests.apertus_model.corpora import corpus_spec
from tests.apertus_model.preference_artifacts import put_model, put_rows

FACTS = {"end_of_turn_id": 68, "pad_id": 10}
STAGE = """
import sys
from apertus_model.work.local import run_in_processes
from specs.job import Job

job = Job.model_validate_json(open(sys.argv[1]).read())
list(run_in_processes(job, sys.argv[2:], 2))
"""


def _sampled(bench: Any, model: Artifact, prompts: Artifact, name: str, workers: int) -> dict[str, bytes]:
    spec = {"sampling": {"n": 2, "max_new_tokens": 6, "batch_size": 2}, "prompts_per_unit": 2}
    inputs = {"model": model, "prompts": prompts}
    return stored_bytes(bench.run("completions", name, spec, inputs, workers=workers))


@pytest.fixture
def prompts(bench: Any) -> Artifact:
    rows = [{"id": str(i), "tokens": [1, 300 + i, *range(400, 400 + i % 4), 67]} for i in range(14)]
    return put_rows(bench, "prompts", "p", rows, FACTS)


@pytest.mark.slow
def test_completions_have_the_same_bits_for_1_2_and_5_workers(
    bench: Any, tokenizer: Artifact, prompts: Artifact
) -> None:
    model = put_model(bench, tokenizer)
    one = _sampled(bench, model, prompts, "one", 1)
    assert _sampled(bench, model, prompts, "two", 2) == one
    assert _sampled(bench, model, prompts, "five", 5) == one


@pytest.mark.slow
def test_completions_have_the_same_bits_when_workers_are_killed_at_random(
    bench: Any, tokenizer: Artifact, prompts: Artifact, capfd: pytest.CaptureFixture[str]
) -> None:
    model = put_model(bench, tokenizer)
    one = _sampled(bench, model, prompts, "one", 1)
    chance, over, killed = random.Random(), threading.Event(), []

    def kill() -> None:
        """Two of them, each after the first unit and at a moment that differs from run to run."""
        while len(killed) < 2 and not over.wait(chance.uniform(0.0, 0.3)):
            workers = children(os.getpid())
            if workers and bench.store.names("completions/two/units"):
                os.kill(chance.choice(workers), signal.SIGKILL)
                killed.append(1)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    try:
        assert _sampled(bench, model, prompts, "two", 2) == one
    finally:
        over.set()
        killer.join()
    assert "exit code -9" in capfd.readouterr().out


def _waiting_corpus(bench: Any, documents: Path, tokenizer: Artifact) -> tuple[Job, list[str], list[Path]]:
    """A corpus of two tasks that each wait for the writer of a pipe; the job, its keys, and the pipes."""
    pipes = [documents / "00.txt", documents / "59.txt"]
    spec = corpus_spec(documents, files_per_task=30)
    spec["listing"] = [f"{i:02d}.txt" for i in range(60)]
    for pipe in pipes:
        pipe.unlink()
        os.mkfifo(pipe)
    job = bench.job("corpus", "c", spec, {"tokenizer": tokenizer}, attempt="first", workers=2)
    Attempt(job)
    return job, ["documents-00000000-00000030", "documents-00000030-00000060"], pipes


def test_no_worker_survives_a_stage_that_is_killed(
    bench: Any, documents: Path, tokenizer: Artifact, tmp_path: Path, deadline: None
) -> None:
    job, keys, _ = _waiting_corpus(bench, documents, tokenizer)
    file = tmp_path / "job.json"
    file.write_text(job.model_dump_json())
    stage = subprocess.Popen([sys.executable, "-c", STAGE, str(file), *keys], stdout=subprocess.PIPE)
    assert stage.stdout is not None
    while len([pid for pid in children(stage.pid) if _waits_for_a_writer(pid)]) < len(keys):
        time.sleep(0.1)
    stage.kill()
    # The workers have the same standard output: it ends with the last of them.
    assert stage.stdout.read() == b""
    stage.wait()


def test_a_unit_that_takes_its_workers_with_it_is_an_error_in_the_end(
    bench: Any, documents: Path, tokenizer: Artifact, deadline: None, capfd: pytest.CaptureFixture[str]
) -> None:
    job, keys, pipes = _waiting_corpus(bench, documents, tokenizer)
    pipes[0].unlink()
    pipes[0].write_text("A text that can be read.")
    pool = local.run_in_processes(job, keys, 2)
    killed = 0

    def kill() -> None:
        """Whoever waits for a writer of the second pipe, which nobody opens."""
        nonlocal killed
        while killed < MOST_LOSSES:
            for pid in filter(_waits_for_a_writer, children(os.getpid())):
                os.kill(pid, signal.SIGKILL)
                killed += 1
            time.sleep(0.2)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    with pytest.raises(WorkerLost, match=rf"the worker of unit {keys[1]} ended with exit code -9"):
        list(pool)
    assert killed == MOST_LOSSES
    assert capfd.readouterr().out.count(f"unit {keys[1]} is begun again") == MOST_LOSSES - 1
    assert not children(os.getpid())


def _waits_for_a_writer(pid: int) -> bool:
    with contextlib.suppress(OSError):  # it has ended
        return Path(f"/proc/{pid}/wchan").read_text() == "wait_for_partner"
    return False


def test_an_error_for_users_ends_the_stage_with_its_words(
    bench: Any, tokenizer: Artifact, tmp_path: Path
) -> None:
    folder = tmp_path / "lines"
    folder.mkdir()
    for name in "ab":
        (folder / f"{name}.jsonl").write_text(json.dumps({"body": "text"}) + "\n")
    spec = {"source": {"url": str(folder), "format": "jsonl"}, "process": {}, "seed": 1, "files_per_task": 1}
    with pytest.raises(StageError, match=r"\.jsonl', line 1: no column 'text'; there are body"):
        bench.run("corpus", "c", spec, {"tokenizer": tokenizer}, workers=2)


def test_the_end_of_a_worker_that_is_stopped_is_not_waited_for(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "END_SECONDS", 0.2)
    worker = local._Worker(_job(bench, 1, None), 0, queue.SimpleQueue())
    os.kill(worker.process.pid, signal.SIGSTOP)
    assert worker.end() == -signal.SIGKILL


def _job(bench: Any, tp: int, workers: int | None) -> Job:
    launch = {"processes": tp, "parallel": {"tp": tp}, "workers": {"count": workers}}
    job: Job = bench.job("completions", "c", launch=launch)
    return job.model_copy(update={"gpus": tp})


def test_a_node_has_as_many_workers_as_gpus_allow_and_each_its_own(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_gpus", lambda: ["0", "1", "2", "3", "6", "7"])
    assert [local.workers_here(_job(bench, tp, None), 1) for tp in (1, 2, 4)] == [6, 3, 1]
    assert local.workers_here(_job(bench, 2, 2), 1) == 2
    seen = [local._environment(_job(bench, 2, None), number)["CUDA_VISIBLE_DEVICES"] for number in range(3)]
    assert seen == ["0,1", "2,3", "6,7"]
    with pytest.raises(StageError, match=r"count is 4, with 2 GPUs for each; .* has 6. Fix: use at most 3"):
        local.workers_here(_job(bench, 2, 4), 1)


def test_without_gpus_the_number_is_the_stated_one_or_that_of_the_kind(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "_gpus", list)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert local.workers_here(_job(bench, 2, None), 1) == 1
    assert local.workers_here(_job(bench, 2, 3), 1) == 3
    assert "CUDA_VISIBLE_DEVICES" not in local._environment(_job(bench, 2, 3), 1)
