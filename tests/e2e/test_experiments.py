"""Probes, a selection and figures, through the flow: on what the smoke recipe trained, and as the
miniatures of the studies."""

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


TWO_SEEDS = "variables.seeds=[28, 29]"
MINIATURES: dict[str, tuple[int, list[str]]] = {  # parts; and changes that take less time, but find nothing
    "wso-mini": (
        153,
        ["variables.steps=20 steps", "variables.stable_steps=15", "variables.decay_steps=5 steps",
         "variables.half=10", "variables.warmup=2 steps", "variables.mid_steps=5 steps",
         "variables.over_steps=8 steps", "variables.over_stable_steps=4",
         "variables.over_decay_steps=4 steps", "variables.sft_steps=3 steps", "variables.sft_warmup=1 steps",
         "variables.probe.probes=2"],
    ),
    "optimizer-consistency-mini": (
        64,
        ["variables.steps=30 steps", "variables.warmup=4 steps", "variables.sft_steps=8 steps",
         "variables.sft_warmup=2 steps"],
    ),
    "goldfish-mini": (40, ["variables.budget=60k tokens", "variables.warmup=5 steps"]),
    "optimizer-benchmark-mini": (
        43,
        [TWO_SEEDS, "variables.steps=16 steps", "variables.warmup=2 steps", "variables.warmup_free=2 steps",
         "variables.rates=[1e-3, 3e-3]"],
    ),
    "ladder-mini": (23, [TWO_SEEDS, "variables.steps=80"]),
    "distill-mini": (
        20,
        [TWO_SEEDS, "variables.steps=24 steps", "variables.longer=50 steps",
         "stages.teacher.budget=40 steps"],
    ),
    "domain-weights-mini": (61, ["variables.proxy_steps=20", "variables.steps=24"]),
    "depth-average-mini": (13, [TWO_SEEDS, "variables.steps=24"]),
    "layer-pairs-mini": (67, ["variables.steps=30"]),
    "sparse-attention-mini": (57, ["variables.steps=24"]),
    "repeats-mini": (15, [TWO_SEEDS, "variables.steps=24"]),
    "mamba-mini": (
        36,
        ["stages.teacher.budget=40 steps", "stages.student.budget=30 steps", "stages.orient.budget=15 steps",
         "stages.align.budget=15 steps", "stages.staged.budget=20 steps"],
    ),
    "continue-pretrain-mini": (47, ["variables.steps=60 steps", "variables.new_steps=30 steps"]),
    "rounds-mini": (
        69,
        [TWO_SEEDS, "stages.pretrain.budget=60k tokens", "stages.pretrain.global_batch_size=4",
         "stages.pretrain.mixture=main", "stages.sft.budget=40 steps", "stages.preferences-1.limit=48",
         "stages.preferences-2.limit=48", "stages.evaluate-0.generation.limit=50",
         "stages.evaluate-1.generation.limit=50", "stages.evaluate-2.generation.limit=50",
         "stages.align-1.budget=12 steps", "stages.align-2.budget=12 steps"],
    ),
    "tokenizer-study-mini": (8, []),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MINIATURES)
def test_a_miniature_runs_to_its_end_and_every_point_of_its_figures_is_there(
    home: Path, api: str, name: str
) -> None:
    recipe, store = f"specs/recipes/{name}.yaml", home / "studies"  # of all: most have the same corpus
    parts, changes = MINIATURES[name]
    run = Run(home, "run", recipe, "--store", str(store), overrides=changes, api=api)
    assert run.wait(1800) == 0, run.text
    plan = make(load(ROOT / recipe, changes), Store.open(str(store)))
    assert plan.pending == [] and len(plan.graph.nodes) == parts
    for found in collect(plan).experiments.values():
        assert found.missing == []
        assert all(math.isfinite(point.y.value) for points in found.points.values() for point in points)
