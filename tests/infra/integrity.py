"""What the tests of integrity share: a bucket, a store that does not wait between two tries, an attempt."""

from __future__ import annotations

import logging
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from infra.store import Attempt, Store
from infra.store.storage.retry import Retry
from tests.jobs import job_at

PIECE, PART = 2**10, 2**14


def bucket() -> Iterator[str]:
    """URL of an empty bucket on moto's server, which ends with the generator."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    reset = urllib.request.Request(f"http://{host}:{port}/moto-api/reset", method="POST")
    urllib.request.urlopen(reset).close()  # what an earlier server of this process held is still there
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        fsspec.filesystem("s3").makedirs("bucket", exist_ok=True)
        yield "s3://bucket"
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    server.stop()


def quick(**options: Any) -> Retry:
    return Retry(**{"sleep": no_pause} | options)


def no_pause(seconds: float) -> None:
    """Nobody waits."""


def attempt(
    store: Store, tmp_path: Path, name: str = "first", path: str = "pretrain/f", **fields: Any
) -> Attempt:
    return Attempt(job_at(path, store, tmp_path, name, **fields), store)
