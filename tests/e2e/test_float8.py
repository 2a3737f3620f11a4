"""An excursion to float8 and its rollback, as docs/recipes.md has them: on the smoke recipe, emulated."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

from flows.planning.plan import make
from infra.store import Store
from specs.recipe import load
from tests.e2e.conftest import SMOKE, Run
from tests.e2e.test_smoke import artifact, plan_of, result

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("torchao") is None, reason="no torchao: pip install apertus[float8]"
    ),
]


def test_an_excursion_to_float8_is_a_branch_and_its_rollback_the_recipe_itself(
    finished: Path, home: Path, api: str, tmp_path: Path
) -> None:
    store, recipe = str(shutil.copytree(finished, tmp_path / "store")), str(tmp_path / "float8.yaml")
    settings = ["precision={param: float32, linear: float8}", "stop_at=10 steps"]
    options = [argument for setting in settings for argument in ("--set", f"stages.float8.{setting}")]
    branch = Run(
        home, "branch", SMOKE, "pretrain@step=20", "--name", "float8", "--output", recipe, "--store", store,
        *options,
    )  # fmt: skip
    assert branch.wait(60) == 0, branch.text
    run = Run(home, "run", recipe, "--store", store, "--until", "float8", api=api)
    assert run.wait(240) == 0, run.text
    there = make(load(recipe), Store.open(store))
    excursion = [row for row in artifact(there, "float8").history() if "loss" in row]
    whole = plan_of(store)
    main = [row for row in artifact(whole, "pretrain/2").history() if "loss" in row][:10]
    assert [row["lr"] for row in excursion] == [row["lr"] for row in main]
    losses, expected = ([row["loss"] for row in rows] for rows in (excursion, main))
    assert losses != expected
    # the weights are the same at first, and part at a high rate: by 0.1 to 3%, by the text of this machine
    assert losses[0] == pytest.approx(expected[0], rel=0.005)
    assert losses == pytest.approx(expected, rel=0.05)
    assert whole.pending == []  # nothing of the branch is read, and nothing is trained again
    assert result(store) == result(finished)
