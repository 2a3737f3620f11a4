"""A folder with a recipe that others extend."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.specs.composing import BASE, write


@pytest.fixture
def beside_the_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder has `base.yaml`."""
    monkeypatch.chdir(tmp_path)
    write("base.yaml", BASE)
