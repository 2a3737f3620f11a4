"""A stage run as the launcher would run it, in this process."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import pytest

from apertus_model.stop import StopSignal
from infra.store import Artifact, Attempt, Store
from specs.job import InputRef, Job
from tests.apertus_model import ranks
from tests.jobs import input_at, job_at, run_stage

RANK_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


class Bench:
    """A store in a temporary folder; `run` executes one stage and returns what it committed."""

    def __init__(self, folder: Path, url: str | None = None) -> None:
        self.folder = folder
        self.store = Store.open(url or str(folder / "store"))
        self.store.initialise()

    def job(
        self,
        kind: str,
        fingerprint: str,
        spec: dict[str, Any] | None = None,
        inputs: Mapping[str, Artifact | InputRef] | None = None,
        *,
        attempt: str = "first",
        workers: int = 1,
        launch: dict[str, Any] | None = None,
        **fields: Any,
    ) -> Job:
        fields |= {"spec": spec or {}, "identity": spec or {}}
        fields["inputs"] = {
            role: read if isinstance(read, InputRef) else input_at(read.path)
            for role, read in (inputs or {}).items()
        }
        fields["launch"] = {"workers": {"count": workers}} | (launch or {})
        return job_at(f"{kind}/{fingerprint}", self.store, self.folder, attempt, **fields)

    def run(
        self,
        kind: str,
        fingerprint: str,
        spec: dict[str, Any],
        inputs: Mapping[str, Artifact | InputRef] | None = None,
        *,
        attempt_class: type[Attempt] = Attempt,
        stop: StopSignal | None = None,
        **options: Any,
    ) -> Artifact:
        return run_stage(self.job(kind, fingerprint, spec, inputs, **options), attempt_class, stop)


@pytest.fixture(autouse=True)
def no_process_group() -> Iterator[None]:
    """A stage or a library that ran in this process may have prepared it as a rank; processes that later
    tests fork would take its process group for theirs, and wait for ever."""
    before = set(os.environ)
    yield
    for name in RANK_VARIABLES & os.environ.keys() - before:
        del os.environ[name]
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def fresh_processes_where_a_test_patches(request: pytest.FixtureRequest) -> None:
    ranks.patched = "monkeypatch" in request.fixturenames


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Sixty small documents, all different."""
    random = Random(0)
    words = [
        "".join(random.choices("abcdefghijklmnopqrstuvwxyzäöüéß", k=random.randint(2, 9))) for _ in range(300)
    ]
    return [" ".join(random.choices(words, k=random.randint(20, 90))) + f"\n\nnumber {i}" for i in range(60)]


@pytest.fixture
def documents(tmp_path: Path, texts: list[str]) -> Path:
    """The documents as sixty files."""
    return _write(texts, tmp_path / "documents")


def _write(texts: list[str], folder: Path) -> Path:
    folder.mkdir()
    for i, text in enumerate(texts):
        (folder / f"{i:02d}.txt").write_text(text)
    return folder


@pytest.fixture(scope="session")
def trained_tokenizer(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Artifact:
    """Of the documents, in a store that nothing else writes to."""
    folder = tmp_path_factory.mktemp("tokenizer")
    source = {"url": str(_write(texts, folder / "documents")), "format": "text"}
    spec = {"sources": [source], "vocab_size": 512, "bytes_per_source": 100_000}
    return Bench(folder).run("tokenizer", "tokenizer0", spec)


@pytest.fixture
def tokenizer(bench: Bench, trained_tokenizer: Artifact) -> Artifact:
    trained = trained_tokenizer.store.full(trained_tokenizer.path)
    shutil.copytree(trained, bench.store.full(trained_tokenizer.path))
    return Artifact(bench.store, trained_tokenizer.path)


@pytest.fixture
def deadline() -> Iterator[None]:
    """Ends a test that waits for something that does not happen."""

    def expire(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("the test waited for 60 seconds")

    previous = signal.signal(signal.SIGALRM, expire)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)
