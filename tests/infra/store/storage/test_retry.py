"""Storage that fails or stalls: a call is met with another try, or told."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from infra.store import StorageError, Store, StoreError
from infra.store.storage.retry import is_transient
from tests.infra.failing import Failing, elsewhere, fails_first
from tests.infra.integrity import quick


@pytest.mark.parametrize("method", ["info", "cat_file", "pipe_file", "ls", "rm"])
@pytest.mark.parametrize(
    "error",
    [OSError(errno.EIO, "x"), TimeoutError(), ConnectionResetError(), OSError(errno.EBUSY, "SlowDown")],
)
def test_an_error_of_the_storage_is_met_with_another_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, error: Exception
) -> None:
    store = elsewhere(tmp_path)
    Failing(monkeypatch, store.fs, **{method: fails_first(6, error)})
    assert store.write_once("a/b.json", b'{"x": 1}')
    assert store.names("a") == ["b.json"]
    assert store.exists("a/b.json")
    assert not store.exists("a/c.json")
    assert store.read_json("a/b.json") == {"x": 1}
    store.remove("a/b.json")
    assert store.read_if_there("a/b.json") is None


def test_a_lasting_error_names_what_was_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    store = elsewhere(tmp_path, sleep=pauses.append, chance=lambda: 1.0)
    Failing(monkeypatch, store.fs, info=fails_first(99))
    with pytest.raises(
        StorageError,
        match=r"failed 7 times: looking for 'a' in the store memory://.*OSError: \[Errno 5\] injected",
    ):
        store.exists("a")
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 15.0]


@pytest.mark.parametrize(
    "error",
    [PermissionError("no"), FileNotFoundError("none"), OSError(errno.ENOSPC, "full"), ValueError("ours")],
)
def test_an_error_that_retries_cannot_fix_is_raised_at_once(error: Exception) -> None:
    tries = []

    def call() -> None:
        tries.append(1)
        raise error

    with pytest.raises((StorageError, type(error))):
        quick().call("x", call)
    assert tries == [1]


def test_errors_of_the_s3_client_that_are_no_os_errors_are_known() -> None:
    from botocore import exceptions

    assert is_transient(exceptions.ReadTimeoutError(endpoint_url="http://x"))
    assert is_transient(exceptions.EndpointConnectionError(endpoint_url="http://x"))
    assert not is_transient(exceptions.NoCredentialsError())


def test_a_call_that_stalls_is_given_up_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, released = elsewhere(tmp_path, stall=0.05), threading.Event()

    def stalls(number: int, call: Callable[[], Any]) -> Any:
        if number == 1:
            released.wait(20)
        return call()

    Failing(monkeypatch, store.fs, cat_file=stalls)
    begin = time.monotonic()
    assert store.read_json("format.json") == {"format": 3}
    assert time.monotonic() - begin < 5
    released.set()


@pytest.mark.parametrize("stated", ["abc", "-1", "0", "inf", "1e9"])
def test_a_timeout_that_is_none_is_refused_when_a_store_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stated: str
) -> None:
    monkeypatch.setenv("APERTUS_STORE_TIMEOUT", stated)
    fix = "Fix: set it to seconds between 0.1 and 86,400"
    with pytest.raises(StoreError, match=rf"APERTUS_STORE_TIMEOUT is '{stated}'. {fix}"):
        elsewhere(tmp_path)


def test_the_environment_sets_what_an_s3_store_waits_for(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Store.open(f"{s3}/x").fs.config_kwargs["read_timeout"] == 30
    monkeypatch.setitem(
        fsspec.config.conf, "s3", {"config_kwargs": '{"read_timeout": 7}', "max_concurrency": 3}
    )
    fs = Store.open(f"{s3}/x").fs
    assert (fs.config_kwargs["read_timeout"], fs.config_kwargs["connect_timeout"], fs.max_concurrency) == (
        7,
        10,
        3,
    )
