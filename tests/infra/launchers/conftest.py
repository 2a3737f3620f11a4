"""A cluster that is not there."""

from __future__ import annotations

import pytest

from infra import slurm


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "POLL_SECONDS", 0.3)
    monkeypatch.setattr(slurm, "VISIBLE_SECONDS", 3.0)
