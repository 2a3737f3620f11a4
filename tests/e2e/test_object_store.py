"""Whole pipelines with their store on Swift, by its S3 interface."""

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


SHORTER = [  # without gates, which so little training does not meet
    "stages.pretrain.budget=80k tokens", "stages.pretrain.global_batch_size=4",
    "stages.pretrain.mixture=main", "stages.cooldown.budget=40k tokens", "stages.evaluate-base.gates=[]",
    "stages.sft.budget=40 steps", "stages.evaluate-sft.generation.limit=60", "stages.preferences.limit=64",
    "stages.align.budget=20 steps", "stages.evaluate-aligned.generation.limit=60",
    "stages.evaluate-aligned.matrix.qrpo={}",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_miniature_runs_on_an_object_store(home: Path, api: str, swift: Swift) -> None:
    with swift.in_environment() as bucket:
        words = ["run", "specs/recipes/mini.yaml", "--store", f"{bucket}/store"]
        run = Run(home, *words, overrides=SHORTER, api=api)
        assert run.wait(3500) == 0, run.text
        again = Run(home, *words, overrides=SHORTER)
        assert again.wait(120) == 0 and "nothing to run" in again.text
