"""Stores that are not on this disk: moto's S3 server on the loopback, and a file system that lets every
request wait.

Invariant: nothing leaves the machine.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
from fsspec.implementations.memory import MemoryFileSystem

from apertus_model.data.tokens.stream import TokenShard
from benchmarks.synthetic import VOCAB
from infra.store import Artifact, Attempt, Store
from infra.store.reading.ranges import BlockCache, StoredFile
from specs.job import Job
from tests.infra.moto import Moto


class Latency(MemoryFileSystem):
    """Files in memory; each request takes `SECONDS` more. `latency://...`"""

    protocol = "latency"
    SECONDS = 0.02
    store: dict[str, Any] = {}  # noqa: RUF012  (as in the class above)
    pseudo_dirs = [""]  # noqa: RUF012

    def cat_file(self, *arguments: Any, **options: Any) -> bytes:
        time.sleep(self.SECONDS)
        data: bytes = super().cat_file(*arguments, **options)
        return data

    def info(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        time.sleep(self.SECONDS)
        found: dict[str, Any] = super().info(*arguments, **options)
        return found


fsspec.register_implementation("latency", Latency, clobber=True)


@contextmanager
def s3_server() -> Iterator[str]:
    """URL of a folder in a bucket of a server of moto's that lives as long as the context."""
    server = Moto()
    server.start()
    try:
        with server.in_environment() as bucket:
            yield f"{bucket}/store"
    finally:
        server.stop()


def artifact_on(url: str, shards: list[Path], scratch: Path) -> Artifact:
    """A committed artifact with these shards, given by their paths without suffix."""
    store = Store.open(url)
    store.initialise()
    fingerprint = "c" * 32
    job = Job(
        node="corpus", kind="corpus", version=1, fingerprint=fingerprint, spec={}, identity={}, inputs={},
        launch={}, store=url,
        path=f"corpus/{fingerprint}", attempt="first", scratch=str(scratch),
        progress=str(scratch / "progress"),
    )  # fmt: skip
    attempt = Attempt(job, store)
    for shard in shards:
        for suffix in (".bin", ".idx"):
            attempt.put(f"{shard}{suffix}", shard.name + suffix)
    attempt.commit(metrics={}, facts={"train": [shard.name for shard in shards]})
    return Artifact(store, job.path)


def shards_of(artifact: Artifact, scratch: Path) -> tuple[list[TokenShard], BlockCache]:
    """Its shards, read in blocks however small they are, with an empty cache."""
    cache = BlockCache(scratch)
    names = artifact.manifest.facts["train"]
    files = [[StoredFile(artifact, name + suffix, cache) for suffix in (".bin", ".idx")] for name in names]
    return [TokenShard(data, index, np.dtype("<i4"), VOCAB) for data, index in files], cache
