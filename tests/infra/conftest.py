"""Stores on every kind of storage that the tests can have."""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.store import Store

PLACES = ("disk", "memory", "moto", "swift")


@pytest.fixture(params=PLACES)
def any_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of an empty place for a store, on each kind of storage in turn; `s3://` of this process means
    the server in question."""
    if request.param == "disk":
        yield str(tmp_path / "store")
    elif request.param == "memory":
        yield f"memory://{uuid.uuid4().hex}"
    else:
        with request.getfixturevalue(request.param).in_environment() as bucket:
            yield f"{bucket}/store"


@pytest.fixture
def any_store(any_url: str) -> Store:
    """A new store, on each kind of storage in turn."""
    store = Store.open(any_url)
    store.initialise()
    return store


@pytest.fixture
def no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """A filesystem without hard links."""

    def refuse(source: object, target: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """The file that an attack would make."""
    return tmp_path / "planted"
