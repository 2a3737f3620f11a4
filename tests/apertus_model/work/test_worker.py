"""A worker ends with its stage, says its error in the store, and leaves committed units alone."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from apertus_model.work import worker
from apertus_model.work.units import Shares, failure_file
from infra.store import Artifact, Attempt, Store
from infra.store.documents import to_json
from specs.job import Failure, Job
from tests.apertus_model.corpora import corpus_spec

ROOT = Path(__file__).resolve().parents[3]
WATCHED = """
import sys
import threading
from apertus_model.work.units import Shares
from apertus_model.work.worker import _end_with_stage
from infra.store import Store
_end_with_stage(Store.open(sys.argv[1]), Shares.model_validate_json(sys.argv[2]), threading.Event())
"""


def _shares(job: Job, *shares: list[str], lost_seconds: float = 600.0) -> Shares:
    return Shares(job=job, shares=list(shares), alive=f"{job.path}/alive", lost_seconds=lost_seconds, cpus=1)


def test_python_has_nothing_to_say_about_how_a_worker_starts() -> None:
    words = [sys.executable, "-m", "apertus_model.work.worker", "1"]
    started = subprocess.run(words, input="", capture_output=True, text=True, cwd=ROOT)
    assert started.returncode and "RuntimeWarning" not in started.stderr


def test_a_worker_ends_when_its_stage_sends_no_heartbeat(bench: Any) -> None:
    stated = _shares(bench.job("corpus", "c"), [], lost_seconds=1.0)
    bench.store.overwrite(stated.alive, b"0")
    words = [sys.executable, "-c", WATCHED, bench.store.url, stated.model_dump_json()]
    watched = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    end = time.monotonic() + 3.0
    while time.monotonic() < end:
        bench.store.overwrite(stated.alive, str(time.monotonic()).encode())
        assert watched.poll() is None
        time.sleep(0.05)
    assert watched.wait(60.0) == 1
    assert watched.stdout is not None
    assert watched.stdout.read() == "no heartbeat from the stage for 1 s: this worker ends\n"


def _begin(bench: Any, job: Job, *shares: list[str]) -> str:
    """Writes shares; the path of their file."""
    file = f"{job.path}/attempts/first/workers/0.json"
    bench.store.write_bytes(file, to_json(_shares(job, *shares)))
    return file


def _watches_no_more() -> None:
    """A process that was a worker does not end ten minutes later."""
    for thread in threading.enumerate():
        if "_end_with_stage" in thread.name:
            thread.join(5)
            assert not thread.is_alive()


def test_a_share_is_committed_without_units_that_exist(
    bench: Any, documents: Path, tokenizer: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = corpus_spec(documents, files_per_task=20)
    job = bench.job("corpus", "c", spec, {"tokenizer": tokenizer})
    keys = [f"documents-{first:08d}-{first + 20:08d}" for first in (0, 20, 40)]
    file, attempt = _begin(bench, job, keys[:1], keys[1:]), Attempt(job)
    attempt.commit_unit(keys[1], data="of another worker")
    monkeypatch.setenv("APERTUS_SCRATCH", str(bench.folder))
    assert worker.main(bench.store.url, file, "1") == 0
    _watches_no_more()
    assert [attempt.unit(key) is not None for key in keys] == [False, True, True]
    assert attempt.committed_unit(keys[1]).data == "of another worker"
    paths = [record.path for record in attempt.committed_unit(keys[2]).files.values()]
    folders = {path.rpartition("/")[0] for path in paths}  # of this worker: no other one writes there
    assert (
        len(folders) == 1 and folders.pop().rpartition("/")[0] == f"corpus/c/attempts/first/units/{keys[2]}"
    )
    assert not list(bench.folder.glob("apertus-worker-*"))


def test_an_error_is_in_the_store(
    bench: Any, tokenizer: Artifact, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "lines"
    folder.mkdir()
    (folder / "a.jsonl").write_text(json.dumps({"body": "text"}) + "\n")
    spec = {"source": {"url": str(folder), "format": "jsonl"}, "process": {}, "seed": 1, "files_per_task": 1}
    job = bench.job("corpus", "c", spec, {"tokenizer": tokenizer})
    file = _begin(bench, job, ["documents-00000000-00000001"])
    assert worker.main(bench.store.url, file, "0") == 1
    stored = Store.open(bench.store.url).read_bytes(failure_file("corpus/c/attempts/first/workers", "0-0"))
    failure = Failure.model_validate_json(stored)
    assert "a.jsonl', line 1: no column 'text'" in failure.message and not failure.again
    assert "Traceback" not in capfd.readouterr().err
