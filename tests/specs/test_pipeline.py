"""What a pipeline says of its stages: their launch settings, and the matrix that they come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from specs.errors import Problem, SpecError
from specs.launch import Workers
from specs.pipeline import Pipeline
from specs.recipe import load
from tests.recipes import RECIPE, write_recipe


@pytest.mark.parametrize(("processes", "threads"), [(1, 2), (2, 1), (8, 1)])
def test_launch_settings_have_defaults_for_the_number_of_processes(processes: int, threads: int) -> None:
    stage = {"kind": "tokenizer", "path": "/nowhere", "launch": {"processes": processes}}
    pipeline = Pipeline.model_validate({"name": "t", "stages": {"tokenizer": stage}})
    launch = pipeline.launch_of(pipeline.stages["tokenizer"])
    assert (launch.processes, launch.threads, launch.workers) == (processes, threads, None)


def test_a_stage_replaces_single_fields_of_the_launch_settings(tmp_path: Path) -> None:
    pipeline = load(
        write_recipe(tmp_path),
        ["launch={processes: 2, threads: 3, workers: {count: 4}}", "stages.evaluate.launch={threads: 5}"],
    )
    launches = [pipeline.launch_of(pipeline.stages[name]) for name in ("evaluate", "export")]
    assert [(launch.processes, launch.threads, launch.workers) for launch in launches] == [
        (2, 5, Workers(count=4)),
        (2, 3, Workers(count=4)),
    ]


def test_a_variant_belongs_to_its_matrix_and_another_stage_to_itself(tmp_path: Path) -> None:
    tuned = (
        "  tuned: {{kind: cooldown, from: pretrain, mixture: main, matrix: {{budget: [4 steps, 8 steps]}}}}\n"
    )
    pipeline = load(write_recipe(tmp_path, RECIPE + tuned))
    assert {pipeline.family(name) for name in pipeline.stages if name.startswith("tuned-")} == {"tuned"}
    assert pipeline.family("cooldown") == "cooldown"


def test_a_problem_of_the_plan_that_variants_share_is_stated_once(tmp_path: Path) -> None:
    variants = "cooldown:\n    matrix: {{z_loss: [1e-4, 2e-4, 3e-4]}}"
    text = RECIPE.replace("cooldown:", variants, 1).replace("from: cooldown", "from: cooldown-1e-4")
    pipeline = load(write_recipe(tmp_path, text))
    shared = [
        Problem(("stages", f"cooldown-{rate}", "budget"), "too short") for rate in ("1e-4", "2e-4", "3e-4")
    ]
    [problem] = pipeline.located(SpecError([*shared])).problems
    assert problem.path[1] == "cooldown-1e-4"
    assert "tiny.yaml:" in problem.where
