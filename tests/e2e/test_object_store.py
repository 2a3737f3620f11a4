"""Whole pipelines with their store on Swift, by its S3 interface."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import SMOKE, Run
from tests.e2e.test_alignment import CHAT
from tests.e2e.test_smoke import result
from tests.infra.swift import Swift


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_kind_of_stage_runs_on_an_object_store(
    finished: Path, home: Path, api: str, swift: Swift
) -> None:
    with swift.in_environment() as bucket:
        store = f"{bucket}/store"
        run = Run(home, "run", SMOKE, "--store", store, api=api)
        assert run.wait(800) == 0, run.text
        assert result(store) == result(finished)
        aligned = Run(home, "run", CHAT, "--store", store, api=api)
        assert aligned.wait(800) == 0, aligned.text
        again = Run(home, "run", CHAT, "--store", store)
        assert again.wait(120) == 0 and "nothing to run" in again.text
