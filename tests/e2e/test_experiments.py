"""Probes, a selection and figures, through the flow: on what the smoke recipe trained, and as the
miniatures of the studies."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

from flows.planning.plan import Plan, make
from flows.report.claims import claims_of
from flows.report.content import collect
from infra.store import Artifact, Store
from specs.recipe import load
from tests.e2e.conftest import ROOT, SMOKE, Run
from tools.studies import recorded

STUDY = f"""\
extends: {ROOT / SMOKE}
name: study
stages:
  probe:
    kind: probe
    matrix: {{early: {{from: "pretrain@step=20"}}, late: {{from: pretrain}}, best: {{from: chosen}}}}
    sources: [corpus/code]
    samples: 2
    sharpness: {{probes: 2}}
  chosen: {{kind: select, checkpoints: ["pretrain@step=20", pretrain]}}
figures:
  sharpness:
    title: Sharpness
    y: {{stage: "probe-{{variant}}", metric: sharpness}}
    series: {{half of it: early, all of it: late, chosen: best}}
"""


def metrics(plan: Plan, name: str) -> dict[str, float]:
    node = plan.graph.nodes[name]
    return Artifact(plan.store, node.path, node.end_step).manifest.metrics  # type: ignore[no-any-return]  # as stored


@pytest.mark.slow
def test_probes_of_a_chosen_checkpoint_stand_in_a_figure(
    finished: Path, home: Path, api: str, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    shutil.copytree(finished, store)
    recipe = tmp_path / "study.yaml"
    recipe.write_text(STUDY)
    run = Run(home, "run", str(recipe), "--store", str(store), api=api)
    assert run.wait() == 0, run.text
    plan = make(load(recipe), Store.open(str(store)))
    assert plan.pending == []
    values = [
        Artifact(plan.store, plan.graph.segments("pretrain")[i].path).checkpoint(step).facts["validation"]
        for i, step in ((0, 20), (1, 40))
    ]
    means = [sum(losses.values()) / len(losses) for losses in values]
    lowest = means.index(min(means))  # which one it is depends on the machine's installed text
    choice = metrics(plan, "chosen")
    assert choice["chosen"] == lowest and choice["value"] == pytest.approx(means[lowest])
    best, measured = plan.graph.nodes["probe-best"], ["probe-early", "probe-late"]
    assert best.inputs["checkpoint"].name == ["pretrain/1", "pretrain/2"][lowest]
    # the same work, done once
    assert [best.fingerprint == plan.graph.nodes[name].fingerprint for name in measured] == [
        index == lowest for index in range(2)
    ]
    probed = [metrics(plan, name) for name in (*measured, "probe-best")]
    assert probed[0] != probed[1] and probed[2] == probed[lowest]
    model = plan.graph.trajectories["pretrain"].model
    for found in probed:
        assert found["sharpness"] == pytest.approx(found["sharpness/trace"] / model.parameters)
    drawn = collect(plan).experiments["sharpness"].points
    assert [point.y.value for series in drawn.values() for point in series] == [
        found["sharpness"] for found in probed
    ]


STUDIES = sorted(path.stem for path in (ROOT / "specs/recipes").glob("*-mini.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("name", STUDIES)
def test_a_study_runs_to_its_end_and_has_the_verdicts_of_the_page(home: Path, api: str, name: str) -> None:
    """A verdict that differs on this machine is unstable. The page has to say so: record the result with
    `tools.studies`."""
    recipe, store = f"specs/recipes/{name}.yaml", home / "studies"  # of all: most have the same corpus
    run = Run(home, "run", recipe, "--store", str(store), api=api)
    assert run.wait(3600) == 0, run.text
    plan = make(load(ROOT / recipe), Store.open(str(store)))
    assert plan.pending == []
    stated = {
        claims[0].text: {claim.verdict for claim in claims}
        for study in recorded()
        if study.pipeline.name == name
        for claims in study.claims()
    }
    for experiment in collect(plan).experiments.values():
        assert experiment.missing == []
        assert all(math.isfinite(point.y.value) for points in experiment.points.values() for point in points)
        for claim in claims_of(experiment):
            assert claim.verdict in stated[claim.text], f"{claim.text}: {claim.reasoned} by {claim.shown}"
