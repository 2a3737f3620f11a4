"""A store on this disk."""

from pathlib import Path

import pytest

from infra.store import Store


@pytest.fixture
def local(tmp_path: Path) -> Store:
    return Store.open(str(tmp_path / "store"))
