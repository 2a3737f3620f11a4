"""The notebook plans, runs the smoke recipe and plots what the store has; its cells run in order, as
Jupyter would run them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flows.planning.plan import make
from infra.store import Artifact, Store
from specs.recipe import load

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "plot_losses.ipynb"


def cells() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text())["cells"]
    return found


def test_the_checked_in_notebook_holds_no_output() -> None:
    code = [cell for cell in cells() if cell["cell_type"] == "code"]
    assert [(cell["outputs"], cell["execution_count"]) for cell in code] == [([], None)] * 4


@pytest.mark.slow
def test_the_notebook_plots_every_step_of_the_smoke_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(NOTEBOOK.parent)
    monkeypatch.setenv("APERTUS_STORE", str(tmp_path))
    names: dict[str, Any] = {}
    for cell in cells():
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    plan = make(load(ROOT / "specs/recipes/smoke.yaml"), Store.open(str(tmp_path)))
    (last,) = plan.graph.of("cooldown")
    losses = [
        row["loss"] for row in Artifact(plan.store, last.path, last.end_step).history() if "loss" in row
    ]
    pretrain, cooldown = names["figure"].data
    assert (pretrain.name, cooldown.name) == ("pretrain", "cooldown")
    assert list(cooldown.y) == losses
    # batches of 4, then of 8, of 64 tokens
    tokens = [*range(256, 20 * 256 + 1, 256), *range(20 * 256 + 512, 60 * 256 + 1, 512)]
    assert list(pretrain.x) == tokens[: len(pretrain.x)] == tokens
    assert list(cooldown.x) == [tokens[-1] + 512 * step for step in range(1, 11)]
