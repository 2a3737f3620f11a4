"""A cluster that is not there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from infra import slurm
from infra.launchers import kubernetes as launcher
from tests.infra.launchers.pretended import Pretended


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pretended:
    pretended = Pretended(tmp_path / "cluster")
    monkeypatch.setenv("PATH", f"{pretended.folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(launcher, "POLL_SECONDS", 0.05)
    return pretended


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "POLL_SECONDS", 0.3)
    monkeypatch.setattr(slurm, "VISIBLE_SECONDS", 3.0)
