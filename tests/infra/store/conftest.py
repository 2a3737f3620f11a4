"""Stores of this process, and a bucket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.store import Store
from tests.infra.integrity import bucket


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """URL of a bucket."""
    yield from bucket()


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    opened = Store.open(str(tmp_path / "store") if request.param == "file" else f"memory://{tmp_path.name}")
    opened.initialise()
    return opened
