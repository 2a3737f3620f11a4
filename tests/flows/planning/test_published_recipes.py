"""The published recipes: their plans have the report's numbers, need neither torch nor data nor a network,
and shrink to a miniature; what the pages and the deployments say of all recipes is true.

The numbers are those of the report (arXiv 2509.14233v2, table H.8, appendix E) and of the released scripts,
by `docs/recipes.md`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from ruamel.yaml import YAML

from apertus_model.evaluation.harness.needs import needs_of
from apertus_model.evaluation.harness.tasks import Catalogue
from flows.inspection.goldfish import masked_by_hash
from flows.planning.plan import Plan, make
from specs.filters import DecontaminateFilter
from specs.recipe import load
from specs.schema import json_schema
from specs.stages.conversations import ConversationsPart
from specs.stages.evaluate import EvaluateStage
from specs.stages.sft import SftSegment
from specs.trajectory import Trajectory
from tools.published import OVERVIEW, PAGE, markdown, overview, plan_of

ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "specs" / "recipes"
LADDER = ("apertus-8b", "apertus-70b", "apertus-1.5b-100b", "continue-pretrain")
STUDIES = ("wso", "optimizer-consistency", "goldfish")
NAMES = (*LADDER, *STUDIES, "wso-8b")
LENGTHS = ("8k", "16k", "32k", "64k")


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    return {size: plan_of(f"apertus-{size}") for size in ("8b", "70b")}


def pretraining(plans: dict[str, Plan], size: str) -> Trajectory:
    return plans[size].graph.trajectories["pretrain"]


def cut_at(run: Trajectory, steps: int) -> tuple[str, int, str]:
    """Mixture, batch and decay of the segment that begins after that many steps."""
    segment = next(segment for segment in run.segments if segment.start_step == steps)
    return segment.mixture, segment.batch, segment.schedule.decay


# First iteration of a data stage, from 1; the segment begins when one step less is done. The 8B's stage 3 is
# the exception: the table's number is that of the steps at which the script doubles the batch.
@pytest.mark.parametrize(
    ("size", "steps", "segment", "billions"),
    [
        ("8b", 0, ("stage-1", 1024, "none"), 0),
        ("8b", 1_678_000, ("stage-3", 2048, "none"), 7038),
        ("8b", 2_269_525 - 1, ("stage-4", 2048, "none"), 12_000),
        ("8b", 2_429_920 - 1, ("stage-5", 2048, "1-sqrt"), 13_345),
        ("70b", 0, ("stage-1", 2048, "none"), 0),
        ("70b", 523_518, ("stage-1", 4096, "none"), 4391),
        ("70b", 569_655 - 1, ("stage-2", 4096, "none"), 5165),
        ("70b", 789_001 - 1, ("stage-3", 4096, "none"), 8845),
        ("70b", 989_501 - 1, ("stage-4", 4096, "none"), 12_209),
        ("70b", 1_155_828 - 98_609 - 1, ("stage-4", 4096, "1-sqrt"), 13_345),
        ("70b", 1_062_328 - 1, ("stage-5", 4096, "1-sqrt"), 13_431),
    ],
)
def test_breakpoints_are_those_of_the_report_to_the_iteration(
    plans: dict[str, Plan], size: str, steps: int, segment: tuple[str, int, str], billions: int
) -> None:
    run = pretraining(plans, size)
    assert cut_at(run, steps) == segment
    assert run.tokens_at(steps) // 10**9 == billions


@pytest.mark.parametrize(("size", "segments"), [("8b", 4), ("70b", 7)])
def test_mixture_changes_make_no_other_border(plans: dict[str, Plan], size: str, segments: int) -> None:
    assert len(pretraining(plans, size).segments) == segments


@pytest.mark.parametrize(
    ("size", "last", "doubled", "flops", "final"),
    [("8b", 2_627_139, 1_718_272_000, 7.74e23, 1.1e-5), ("70b", 1_155_828, 1_072_164_864, 6.74e24, 1e-6)],
)
def test_totals_are_those_of_the_report(
    plans: dict[str, Plan], size: str, last: int, doubled: int, flops: float, final: float
) -> None:
    run = pretraining(plans, size)
    nodes = plans[size].graph.of("pretrain")
    assert run.steps == last
    assert run.tokens + run.leftover_tokens == 3_662_109_375 * 4096 == 15 * 10**12
    assert (
        next(segment.start_sample for segment in run.segments if segment.batch > run.segments[0].batch)
        == doubled
    )
    assert run.segments[-1].schedule.decay_start == (3_662_109_375 - 403_905_806) * 4096
    # after the last whole step, which ends just before 15T
    assert run.lr_at(run.steps) == pytest.approx(final, rel=1e-4)
    assert sum(node.flops for node in nodes) == pytest.approx(flops, rel=0.01)
    # left out by Goldfish, nominally
    assert sum(node.tokens for node in nodes) / 50 == pytest.approx(0.3e12, rel=1e-4)


@pytest.mark.parametrize(
    ("size", "billions"),
    [("8b", (78.43, 58.13, 58.72, 29.19)), ("70b", (78.52, 58.22, 58.72, 29.23))],
    ids=["8b", "70b"],
)
def test_long_context_phases_are_those_of_the_scripts(
    plans: dict[str, Plan], size: str, billions: tuple[float, ...]
) -> None:
    found = [
        plans[size].graph.trajectories[f"long-context-{length}/1"] for length in ("8k", "16k", "32k", "64k")
    ]
    assert [round(phase.tokens / 1e9, 2) for phase in found] == list(billions)
    assert [phase.model.rope_theta for phase in found] == [1e6, 2e6, 4e6, 12e6]
    assert {phase.segments[0].batch * phase.settings.sequence_length for phase in found} == {
        pretraining(plans, size).segments[-1].batch * 4096
    }


def test_data_stages_are_planned_in_the_order_of_their_use(plans: dict[str, Plan]) -> None:
    data = {
        size: [stage["name"] for stage in plan.to_json()["stages"] if stage["kind"] == "mixture"]
        for size, plan in plans.items()
    }
    long = [f"long-mix-{length}" for length in ("8k", "16k", "32k", "64k")]
    assert data == {
        "70b": ["stage-1", "stage-2", "stage-3", "stage-4", "stage-5", *long],
        "8b": ["stage-1", "stage-3", "stage-4", "stage-5", *long],
    }
    assert [
        name
        for name in dict.fromkeys(node.stage for node in plans["70b"].graph.nodes.values())
        if name in data["70b"]
    ] == data["70b"]


@pytest.mark.parametrize("size", ["8b", "70b"])
def test_tuning_has_the_seed_of_its_code(plans: dict[str, Plan], size: str) -> None:
    assert [plans[size].graph.nodes[stage].identity["data_seed"] for stage in ("sft", "align")] == [42, 42]


@pytest.mark.parametrize(("size", "batch", "gpus"), [("8b", 512, 256), ("70b", 1024, 512)])
def test_tuning_has_the_steps_of_the_report_on_its_conversations(
    plans: dict[str, Plan], size: str, batch: int, gpus: int
) -> None:
    graph = plans[size].graph
    node = graph.nodes["sft"]
    assert isinstance(node.part, SftSegment)
    assert (node.part.packing, node.part.global_batch_size) == ("none", batch)
    assert plans[size].estimates.stages["sft"].to_json()["gpus"] == gpus  # two conversations to a GPU
    assert node.steps * batch == pytest.approx(3.93e6, rel=1e-3)
    sources = plans[size].pipeline.sources
    parts = [graph.nodes[read.name] for role, read in node.inputs.items() if role.startswith("conv")]
    declared = {part.name: sources[part.name.removeprefix("chat/")].declared for part in parts}
    assert sum(one.documents or 0 for one in declared.values() if one) == 4_184_087
    processes = [part.part.process for part in parts if isinstance(part.part, ConversationsPart)]
    (decontaminate,) = {process.filters[-1].model_dump_json() for process in processes}
    rule = DecontaminateFilter.model_validate_json(decontaminate)
    assert (rule.ngram, rule.min_match, rule.max_share) == (8, 5, 0.5)
    assert all(f"filter:{len(one.filters) - 1}:{len(rule.against) - 1}" in part.inputs
               for one, part in zip(processes, parts, strict=True))  # fmt: skip
    assert sorted(process.count or 0 for process in processes)[-3:] == [0, 200_000, 200_000]


@pytest.mark.parametrize("size", ["8b", "70b"])
def test_the_evaluations_read_the_benchmarks_that_are_kept_out(plans: dict[str, Plan], size: str) -> None:
    pytest.importorskip("lm_eval", reason="the extra `harness` is not installed")
    nodes = plans[size].graph.nodes
    read = {role.removeprefix("data:") for node in nodes.values() for role in node.inputs if "data:" in role}
    part = nodes["chat/sft-code"].part
    assert isinstance(part, ConversationsPart)
    (rule,) = part.process.filters
    folders = [files.url.partition("data/evaluation/")[2] for files in rule.files()]
    assert len(folders) == 14
    # a folder is a snapshot, a folder of one, or holds several
    nested = [(f"{folder}/", f"{name}/") for folder in folders for name in read]
    found = {folder for folder, name in nested if folder.startswith(name) or name.startswith(folder)}
    assert found == {f"{folder}/" for folder in folders}


@pytest.mark.parametrize("size", ["8b", "70b"])
def test_json_has_segments_and_labels_masked_by_goldfish(plans: dict[str, Plan], size: str) -> None:
    run, document = pretraining(plans, size), plans[size].to_json(masked_by_hash)
    borders = [
        (
            segment.start_step,
            segment.end_step,
            run.tokens_at(segment.start_step),
            run.tokens_at(segment.end_step),
        )
        for segment in run.segments
    ]
    (stage,) = [stage for stage in document["stages"] if stage["name"] == "pretrain"]
    estimated = document["estimates"]["stages"]["pretrain"]
    for parts in (stage["parts"], estimated["parts"]):
        assert [
            tuple(part[name] for name in ("start_step", "end_step", "start_tokens", "end_tokens"))
            for part in parts
        ] == borders
    assert estimated["masked_labels"] == pytest.approx(0.3e12, rel=1e-4)
    assert estimated["masked_labels_by_hash"] == pytest.approx(0.0161 * 15e12, rel=5e-3)
    assert (
        sum(part["masked_labels_by_hash"] for part in estimated["parts"])
        == estimated["masked_labels_by_hash"]
    )


def test_the_page_shows_what_is_planned_now() -> None:
    assert markdown() in PAGE.read_text(), "python -m tools.published"


def test_page_lists_all_recipes_with_facts_of_their_plans() -> None:
    assert set(OVERVIEW) == {path.stem for path in RECIPES.glob("*.yaml")}
    assert overview() in PAGE.read_text(), "python -m tools.published"


def test_every_recipe_has_a_deployment_that_names_its_file() -> None:
    deployments = YAML(typ="safe").load(ROOT / "prefect.yaml")["deployments"]
    assert {deployment["name"]: deployment["parameters"]["spec"] for deployment in deployments} == {
        name: f"specs/recipes/{name}.yaml" for name in OVERVIEW
    }
    assert len(deployments) == len(OVERVIEW) and all(deployment["description"] for deployment in deployments)


# Tokens a second and GPU: the report for pretraining, the long-context scripts' notes for the others.
# GPU-hours follow from tokens alone.
SPEEDS = {
    "8b": {
        "pretrain": 6960,
        "long-context-8k": 6150,
        "long-context-16k": 4300,
        "long-context-32k": 3700,
        "long-context-64k": 1800,
    },
    "70b": {
        "pretrain": 723,
        "long-context-8k": 780,
        "long-context-16k": 710,
        "long-context-32k": 480,
        "long-context-64k": 160,
    },
}
PROCESSES = {"8b": (1024, 1024, 2048, 2048, 2048), "70b": (4096, 2048, 2048, 2048, 1024)}


@pytest.mark.parametrize("size", ["8b", "70b"])
def test_gpu_hours_are_those_of_the_published_speed_on_the_processes_of_each_stage(
    plans: dict[str, Plan], size: str
) -> None:
    estimates = plans[size].estimates
    assert estimates.cluster is not None
    there = estimates.cluster.nodes * estimates.cluster.gpus_per_node
    for (name, speed), processes in zip(SPEEDS[size].items(), PROCESSES[size], strict=True):
        found = estimates.stages[name].to_json()
        assert found["gpus"] == processes <= there
        # the MFU has three digits
        assert found["gpu_hours"] == pytest.approx(found["tokens"] / speed / 3600, rel=3e-3)
        assert found["seconds"] == pytest.approx(found["gpu_hours"] * 3600 / processes)
        assert found["energy_kwh"] == pytest.approx(found["gpu_hours"] * 0.56)  # 560 W a GPU, the report
    assert max(PROCESSES[size]) == there
    # "about 6M", the report
    assert size != "70b" or estimates.totals()["gpu_hours"] == pytest.approx(6e6, rel=0.03)


@pytest.mark.parametrize("name", NAMES)
def test_published_recipe_fits_its_gpus_and_has_no_unsilenced_advice(name: str) -> None:
    plan = plan_of(name)
    assert plan.advice.given == []
    assert not [note for note in plan.graph.notes if "silence" in note]
    assert all(stage.to_json()["fits"] for stage in plan.estimates.stages.values())
    hours = plan.estimates.totals()["gpu_hours"]
    assert hours is not None and hours > 0


@pytest.mark.parametrize("path", sorted(RECIPES.rglob("*.yaml")), ids=lambda path: path.stem)
def test_silenced_advice_of_published_recipes_has_a_comment(path: Path) -> None:
    lines = path.read_text().splitlines()
    for at, line in enumerate(lines):
        if path.stem.endswith("-mini") or not line.lstrip().startswith("silence:"):
            continue
        listed = (
            [line]
            if "[" in line
            else [item for item in lines[at + 1 : at + 5] if item.strip().startswith("- ")]
        )
        assert listed and all(" # " in item for item in listed), f"{path.name}: {line}"


def test_the_70b_needs_recomputation_for_long_contexts(plans: dict[str, Plan]) -> None:
    without = make(
        load(RECIPES / "apertus-70b.yaml", ["variables.long_checkpointing=none"]),
        plans["70b"].store,
        ask_network=False,
    )
    advised = {advice.stage: advice.numbers["nearest"] for advice in without.advice.given}
    assert advised == {
        f"long-context-{length}": {"activation_checkpointing": "selective"} for length in LENGTHS
    }


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_in_miniature_is_on_this_machine_alone(name: str) -> None:
    whole, small = plan_of(name), plan_of(f"{name}-mini")
    assert whole.graph.unavailable and not small.graph.unavailable
    assert whole.pipeline.cluster is not None and small.pipeline.cluster is None
    assert small.estimates.totals()["tokens"] * 1000 < whole.estimates.totals()["tokens"]
    assert small.advice.given == [] and not [
        note for note in small.graph.notes if "declare" in note or "silence" in note
    ]


OFFLINE = """\
import socket, sys, tempfile
def refuse(*arguments): raise AssertionError("the plan used the network")
socket.socket.connect = refuse
from flows.planning.plan import make
from infra.store import Store
from specs.filters import DecontaminateFilter
from specs.recipe import load
for recipe in sys.argv[1:]:
    with tempfile.TemporaryDirectory() as folder:
        plan = make(load(recipe), Store.open(folder), ask_network=False)
        document = plan.to_json()
    for heavy in ("torch", "prefect", "transformers"):
        assert heavy not in sys.modules, (recipe, heavy)
    assert set(plan.steps) == set(plan.graph.nodes), recipe
    assert {stage["name"] for stage in document["stages"]} == set(plan.pipeline.stages), recipe
    assert all(stage["parts"] for stage in document["stages"]), recipe
    kinds = ("pretrain", "cooldown", "long_context", "sft", "qrpo")
    training = [node for node in plan.graph.nodes.values() if node.kind in kinds]
    assert training and all(node.tokens > 0 and node.flops > 0 for node in training), recipe
"""


def test_a_plan_is_complete_without_torch_data_or_network(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE, *(str(RECIPES / f"{name}.yaml") for name in NAMES)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_schema_allows_what_the_published_recipes_share() -> None:
    path = RECIPES / "shared" / "apertus.yaml"
    assert list(Draft202012Validator(json_schema()).iter_errors(YAML(typ="safe").load(path))) == []
    assert path.read_text().startswith("# yaml-language-server: $schema=../../pipeline.schema.json\n")


def test_the_plan_says_where_a_task_file_forbids_examples(plans: dict[str, Plan]) -> None:
    pytest.importorskip("lm_eval", reason="the extra `harness` is not installed")
    forbidden = "truthfulqa_mc2 without examples (num_fewshot: 0 in the task file)"
    suites = "stages.evaluate-instruct.harness.suites"
    stated = plan_of("apertus-8b", f"{suites}.six-shot.tasks=[truthfulqa_mc2]")
    found = [any(forbidden in note for note in plan.graph.notes) for plan in (plans["8b"], stated)]
    assert found == [False, True]


def test_every_task_is_one_of_the_harness() -> None:
    pytest.importorskip("lm_eval", reason="the extra `harness` is not installed")
    catalogue = Catalogue(ROOT / "examples" / "tasks")
    stages = load(RECIPES / "apertus-8b.yaml").stages.values()
    named = [
        task
        for stage in stages
        if isinstance(stage, EvaluateStage) and stage.harness
        for suite in stage.harness.suites.values()
        for task in suite.tasks
    ]
    needs = [needs_of(task) for name in named for task in catalogue.tasks(name)]
    assert len(needs) == 433 and not [one for one in needs if one.refusal]
    assert [one.task for one in needs if one.runs_code] == ["humaneval_64_instruct", "mbpp_instruct"]
    assert [one.task for one in needs if one.classified] == ["realtoxicityprompts"]
    assert {"ruler_by_length", "mmlu", "acp_bench"} <= set(named)
