"""A store on each kind of storage, with pieces of a kilobyte."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.store import Store
from tests.infra.integrity import PIECE, quick

PLACES = ("file", "memory", "s3")


@pytest.fixture(params=PLACES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    url = {"file": lambda: str(tmp_path / "store"), "memory": lambda: f"memory://{tmp_path.name}"}.get(
        request.param
    )
    opened = Store.open(url() if url else f"{request.getfixturevalue('s3')}/{tmp_path.name}")
    made = Store(opened.fs, opened.root, retry=quick(), piece_bytes=PIECE)
    made.initialise()
    return made
