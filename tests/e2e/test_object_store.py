"""A whole pipeline with its store on Swift, by its S3 interface; test_deployment.py runs the miniature so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import SMOKE, Run
from tests.e2e.test_smoke import result
from tests.infra.swift import Swift


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_smoke_recipe_has_the_same_results_on_an_object_store(
    finished: Path, home: Path, api: str, swift: Swift
) -> None:
    with swift.in_environment() as bucket:
        run = Run(home, "run", SMOKE, "--store", f"{bucket}/store", api=api)
        assert run.wait(800) == 0, run.text
        assert result(f"{bucket}/store") == result(finished)
