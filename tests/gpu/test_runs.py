"""Whole runs, as a user starts them."""

import os
from pathlib import Path

import pytest

from apertus_model.vllm_client import VLLM_PYTHON
from flows.planning.plan import make
from infra.store import Store
from specs.recipe import load
from tests.e2e.conftest import ROOT, SMOKE, Run
from tests.gpu.conftest import Measured, needs_gpus

SMOKE_CHAT = "specs/recipes/smoke-chat.yaml"


def run_recipe(folder: Path, recipe: str, until: str, *overrides: str) -> str:
    """Runs a recipe up to a stage, and returns the last line that it printed. All parts of that stage are
    then finished."""
    store = folder / "store"
    settings = [word for override in overrides for word in ("--set", override)]
    run = Run(folder, "run", recipe, "--store", str(store), "--until", until, *settings)
    assert run.wait() == 0, run.text[-4000:]
    plan = make(load(ROOT / recipe, overrides), Store.open(str(store)))
    finished = {name for name in plan.graph.nodes if name not in plan.pending}
    assert any(name == until or name.startswith(f"{until}/") for name in finished)
    return run.output.read_text().strip().splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "until"),
    [
        (SMOKE, "evaluate"),
        pytest.param(SMOKE_CHAT, "aligned-model", marks=needs_gpus()),  # tests/e2e runs it on CPUs
    ],
    ids=["smoke", "smoke-chat"],
)
def test_a_smoke_recipe_runs_to_its_end(recipe: str, until: str, tmp_path: Path, measured: Measured) -> None:
    measured("last line", run_recipe(tmp_path, recipe, until))


@needs_gpus()
@pytest.mark.skipif(
    VLLM_PYTHON not in os.environ, reason=f"needs vLLM, in an environment that {VLLM_PYTHON} names"
)
def test_vllm_completes_the_prompts_of_a_recipe(tmp_path: Path, measured: Measured) -> None:
    overrides = ("stages.pretrain.model.head_dim=32", "stages.preferences.completions.engine=vllm")
    measured("last line", run_recipe(tmp_path, SMOKE_CHAT, "preferences", *overrides))
