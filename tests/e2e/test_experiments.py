"""Probes, a selection and figures, through the flow: on what the smoke recipe trained, and as the miniatures of the studies."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

from flows.planning.plan import Plan, make
from flows.report.content import collect
from infra.store import Artifact, Store
from specs.recipe import load
from tests.e2e.conftest import ROOT, SMOKE, Run

STUDY = f"""\
extends: {ROOT / SMOKE}
name: study
stages:
  probe:
    kind: probe
    matrix: {{before: {{from: pretrain}}, after: {{from: chosen}}}}
    sources: [corpus/code]
    samples: 2
    sharpness: {{probes: 2}}
  chosen: {{kind: select, checkpoints: ["pretrain@step=20", pretrain]}}
figures:
  sharpness:
    title: Sharpness
    y: {{stage: "probe-{{variant}}", metric: sharpness}}
    series: {{pretrained: before, chosen: after}}
"""


def metrics(plan: Plan, name: str) -> dict[str, float]:
    node = plan.graph.nodes[name]
    return Artifact(plan.store, node.path, node.end_step).manifest.metrics  # type: ignore[no-any-return]  # as stored


def test_probes_of_a_chosen_checkpoint_stand_in_a_figure(finished: Path, home: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(finished, store)
    recipe = tmp_path / "study.yaml"
    recipe.write_text(STUDY)
    run = Run(home, "run", str(recipe), "--store", str(store))
    assert run.wait() == 0, run.text
    plan = make(load(recipe), Store.open(str(store)))
    assert plan.pending == []
    values = [
        Artifact(plan.store, plan.graph.segments("pretrain")[i].path).checkpoint(step).facts["validation"] for i, step in ((0, 20), (1, 40))
    ]
    means = [sum(losses.values()) / len(losses) for losses in values]
    choice = metrics(plan, "chosen")
    assert means[1] < means[0]
    assert choice["chosen"] == 1 and choice["value"] == pytest.approx(means[1])
    assert plan.graph.nodes["probe-after"].inputs["checkpoint"].name == "pretrain/2"
    assert plan.graph.nodes["probe-after"].fingerprint == plan.graph.nodes["probe-before"].fingerprint  # the same work, done once
    probed = metrics(plan, "probe-before")
    assert probed["sharpness"] == pytest.approx(probed["sharpness/trace"] / plan.graph.trajectories["pretrain"].model.parameters)
    drawn = collect(plan).experiments["sharpness"].points
    assert [point.y.value for series in drawn.values() for point in series] == [probed["sharpness"]] * 2


MINIATURES = {"wso-mini": 46, "optimizer-consistency-mini": 40, "goldfish-mini": 10}


@pytest.mark.slow
@pytest.mark.parametrize("name", MINIATURES)
def test_a_miniature_runs_to_its_end_and_every_point_of_its_figures_is_there(home: Path, tmp_path: Path, name: str) -> None:
    recipe = f"specs/recipes/{name}.yaml"
    run = Run(home, "run", recipe, "--store", str(tmp_path))
    assert run.wait(1800) == 0, run.text
    plan = make(load(ROOT / recipe), Store.open(str(tmp_path)))
    assert plan.pending == [] and len(plan.graph.nodes) == MINIATURES[name]
    for found in collect(plan).experiments.values():
        assert found.missing == []
        assert all(math.isfinite(point.y.value) for points in found.points.values() for point in points)
