"""Layouts that a model, a sequence or a batch does not allow are refused with the recipe, each with field,
value and fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specs.dependencies import order
from specs.errors import SpecError
from specs.launch import Launch, Parallel
from specs.layout import micro_batch_size, misfits
from specs.model import ModelSpec
from specs.recipe import load
from specs.resolution import resolve
from tests.recipes import CHAT, RECIPE, write_recipe


def problems(folder: Path, *overrides: str, recipe: str = RECIPE) -> str:
    with pytest.raises(SpecError) as caught:
        load(write_recipe(folder, recipe), overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("launch", "where", "message"),
    [
        (
            "{processes: 2, parallel: {tp: 2}}",
            "tp: 'pretrain'",
            "n_kv_heads 1 cannot be divided among 2 tensor-parallel processes",
        ),
        (
            "{processes: 32, parallel: {cp: 32}}",
            "cp: 'pretrain', 'cooldown'",
            "sequence_length 32 is not a multiple of 64, which cp 32 needs",
        ),
        (
            "{processes: 2, parallel: {pp: 2, pp_schedule: interleaved-1f1b}}",
            "pp: 'pretrain'",
            "2 layers are too few for a pipeline of 4 stages (2 per process)",
        ),
        (
            "{processes: 2, parallel: {pp: 2}}",
            "pp: 'evaluate'",
            "cannot run in a pipeline (pp 2): it needs the logits on every process",
        ),
        (
            "{processes: 8, parallel: {pp: 2}}",
            "pp: 'pretrain'",
            (
                "a batch of 4 sequences is 1 for each of 4 data-parallel pipelines, which cannot be split"
                " into micro-batches for 2 processes (1f1b)"
            ),
        ),
    ],
)
def test_layout_that_does_not_fit_is_a_problem_of_the_recipe(
    tmp_path: Path, launch: str, where: str, message: str
) -> None:
    line = next(
        line
        for line in problems(tmp_path, f"launch={launch}").splitlines()
        if f"launch.parallel.{where}" in line
    )
    assert message in line
    assert "Fix: " in line


def test_degrees_that_do_not_make_the_processes_are_refused(tmp_path: Path) -> None:
    assert "dp_shard 1 does not make 4 processes" in problems(
        tmp_path, "launch={processes: 4, parallel: {cp: 2, dp_shard: 1}}"
    )
    text = problems(tmp_path, "stages.cooldown.launch.parallel={cp: 2}")
    assert "stages.cooldown.launch.parallel: 'cooldown': tp 1 x cp 2 x pp 1" in text
    assert (
        "does not make 1 processes; the product must be equal to it. Fix: change launch.processes or a"
        " degree." in text
    )


@pytest.mark.parametrize(
    ("stage", "parallel", "message"),
    [
        ("qrpo", "{pp: 2}", "'qrpo' cannot run in a pipeline (pp 2): its loss needs the whole sequences"),
        ("dpo", "{pp: 2}", "'dpo' cannot run in a pipeline (pp 2): its loss needs the whole sequences"),
        ("preferences", "{pp: 2}", "'preferences' cannot run in a pipeline (pp 2): it needs the logits"),
    ],
)
def test_needs_of_an_objective_are_checked_before_anything_runs(
    tmp_path: Path, stage: str, parallel: str, message: str
) -> None:
    text = problems(tmp_path, f"stages.{stage}.launch={{processes: 2, parallel: {parallel}}}", recipe=CHAT)
    assert message in text
    assert f"give '{stage}' a launch.parallel of its own, with dp_shard, dp_replicate or cp" in text


def test_sums_of_earlier_layers_are_refused_in_a_pipeline(tmp_path: Path) -> None:
    layout = "stages.pretrain.launch={processes: 2, parallel: {pp: 2}}"
    load(write_recipe(tmp_path), [layout])
    text = problems(tmp_path, layout, "stages.pretrain.model.depth_average={}")
    assert "launch.parallel.pp: 'pretrain': model.depth_average reads the outputs of earlier layers" in text
    assert "receives only the last one. Fix: use pp: 1." in text


REPEATS = "stages.pretrain.model.repeats={start: 1, layers: 1, times: 2}"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "stages.pretrain.launch={processes: 2, parallel: {pp: 2}}",
            "launch.parallel.pp: 'pretrain': model.repeats runs the same layers several times",
        ),
        (
            "stages.pretrain.launch={processes: 2, parallel: {cp: 2}}",
            "launch.parallel.cp: 'pretrain': model.repeats: layers read the keys of earlier passes",
        ),
        (
            "stages.pretrain.attention=flex",
            "stages.pretrain.attention: 'pretrain': with model.repeats, layers read the keys of earlier"
            " passes, for which flex has no mask. Fix: set attention: auto or sdpa.",
        ),
    ],
)
def test_layouts_that_cannot_read_the_keys_of_earlier_passes_are_refused(
    tmp_path: Path, setting: str, message: str
) -> None:
    load(write_recipe(tmp_path), [setting])
    assert message in problems(tmp_path, setting, REPEATS)
    if "pp" not in setting:  # the control has the keys of one pass
        load(write_recipe(tmp_path), [setting, REPEATS, "stages.pretrain.model.repeats.keys=own"])


def test_weights_per_token_are_refused_in_a_pipeline(tmp_path: Path) -> None:
    layout = "stages.sft.launch={processes: 2, parallel: {pp: 2}}"
    load(write_recipe(tmp_path, CHAT), [layout])
    text = problems(tmp_path, layout, "stages.sft.prompt_weight=0.5", recipe=CHAT)
    assert "the weights of its tokens (weighted-cross-entropy) do not reach the last process" in text
    text = problems(tmp_path, layout, "stages.sft.average=conversations", recipe=CHAT)
    assert "the weights of its tokens (normalised-cross-entropy) do not reach the last process" in text


def test_a_loss_that_compares_neighbours_is_refused_where_sequences_are_cut(tmp_path: Path) -> None:
    layout = "stages.sft.launch={processes: 2, parallel: {cp: 2}}"
    load(write_recipe(tmp_path, CHAT), [layout, "stages.sft.average=conversations"])
    text = problems(tmp_path, layout, "stages.sft.inverse_rl={weight: 0.5}", recipe=CHAT)
    assert "launch.parallel.cp: 'sft' cannot cut sequences (cp 2): inverse_rl compares a place with" in text


def test_compiled_layers_are_not_recomputed_under_tensor_parallelism(tmp_path: Path) -> None:
    settings = [
        "stages.pretrain.model.n_kv_heads=2",
        "stages.pretrain.compile=true",
        "launch={processes: 2, parallel: {tp: 2}}",
    ]
    load(write_recipe(tmp_path), settings)
    text = problems(tmp_path, *settings, "stages.pretrain.activation_checkpointing=full")
    assert "stages.pretrain.compile: torch 2.13 cannot compile layers with activation checkpointing" in text


def test_a_memory_budget_needs_the_compiler(tmp_path: Path) -> None:
    budget = "stages.pretrain.activation_checkpointing=memory_budget"
    text = problems(tmp_path, budget)
    assert "stages.pretrain.activation_checkpointing: memory_budget is what the compiler of a layer" in text
    assert "Fix: set compile: true" in text
    load(write_recipe(tmp_path), [budget, "stages.pretrain.compile=true"])
    assert "memory_budget" in problems(tmp_path, "stages.pretrain.memory_budget=1.5")


def test_selective_recomputation_needs_the_step_sizes_of_mamba_2(tmp_path: Path) -> None:
    linear = "stages.pretrain.model.mamba={layers: all, decay: false}"
    selective = "stages.pretrain.activation_checkpointing=selective"
    assert "not known for layers of mamba without decay. Fix: set full" in problems(
        tmp_path, linear, selective
    )
    load(write_recipe(tmp_path), [linear, selective.replace("selective", "full")])
    load(write_recipe(tmp_path), [linear.replace("false", "true"), selective])


def test_overlapping_tensor_parallelism_needs_the_compiler_and_gathers_to_overlap(tmp_path: Path) -> None:
    heads = "stages.pretrain.model.n_kv_heads=2"
    layout = "launch={{processes: 2, parallel: {{tp: 2, sequence_parallel: {}, async_tp: true}}}}"
    compiled = [f"stages.{name}.compile=true" for name in ("pretrain", "cooldown")]
    text = problems(tmp_path, heads, layout.format("true"))
    assert (
        "launch.parallel.async_tp: 'pretrain', 'cooldown': the compiler rewrites layers for async_tp" in text
    )
    assert "Fix: set compile: true for 'pretrain', 'cooldown'" in text
    text = problems(tmp_path, heads, *compiled, layout.format("false"))
    assert "'pretrain', 'cooldown', 'evaluate': async_tp splits the gathers and reduce-scatters" in text
    load(write_recipe(tmp_path), [heads, *compiled, layout.format("true")])


FLOAT8 = "stages.pretrain.precision={param: float32, linear: float8}"
MXFP8 = "stages.pretrain.precision={param: float32, linear: mxfp8}"


@pytest.mark.parametrize(
    ("settings", "where", "message"),
    [
        (
            ["stages.pretrain.model.ffn_dim=72"],
            "stages.pretrain.precision.linear: 'pretrain'",
            "float8 multiplies sizes in multiples of 16, not model.ffn_dim / tp 1 = 72",
        ),
        (
            ["stages.pretrain.model.n_heads=4", "stages.pretrain.model.n_kv_heads=2",
             "stages.pretrain.model.head_dim=8", "launch={processes: 2, parallel: {tp: 2}}"],
            "stages.pretrain.precision.linear: 'pretrain'",
            "not key heads x head_dim / tp 2 = 8",
        ),
        (
            ["stages.pretrain.sequence_length=24"],
            "stages.pretrain.precision.linear: 'pretrain'",
            "not tokens of a sequence on a process = 24",
        ),
        (
            ["cluster={gpu: A100}"],
            "stages.pretrain.precision.linear: 'pretrain'",
            "the A100 of cluster.gpu has no float8; GPUs from the H100 on have it",
        ),
        (
            [MXFP8],
            "stages.pretrain.precision.linear: 'pretrain'",
            "mxfp8 multiplies sizes in multiples of 32, not key heads x head_dim / tp 1 = 16",
        ),
        (
            [MXFP8, "stages.pretrain.model.n_kv_heads=2", "cluster={gpu: H100}"],
            "stages.pretrain.precision.linear: 'pretrain'",
            "the H100 of cluster.gpu has no MX formats; GPUs from the B200 on have them",
        ),
        (
            [MXFP8, "stages.pretrain.model.n_kv_heads=2", "cluster={gpu: GB200}"],
            "stages.pretrain.precision.linear: 'pretrain'",
            "a GPU returns its products in bfloat16, and precision.param is float32",
        ),
        (
            [MXFP8, "stages.pretrain.model.n_heads=4", "stages.pretrain.model.n_kv_heads=4",
             "launch={processes: 2, parallel: {tp: 2}}"],
            "stages.pretrain.precision.linear: 'pretrain'",
            "layer for it returns whole sums, and tp 2 adds parts",
        ),
        (
            ["stages.sft.lora={rank: 4, alpha: 8}"],
            "stages.sft.precision.linear: 'sft'",
            "adapters are added to layers of the parameters' precision",
        ),
        (
            ["stages.dpo.precision={param: float32, linear: float8}"],
            "stages.dpo.precision.linear: 'dpo'",
            "a log-ratio would not begin at zero",
        ),
        (
            ["stages.preferences.precision={param: float32, linear: float8-rowwise}"],
            "stages.preferences.precision.linear",
            "reference log-probabilities are not computed in float8",
        ),
    ],
)  # fmt: skip
def test_float8_is_refused_where_it_cannot_be_trained(
    tmp_path: Path, settings: list[str], where: str, message: str
) -> None:
    text = problems(tmp_path, FLOAT8, *settings, recipe=CHAT)
    line = next(line for line in text.splitlines() if message in line)
    assert where in line
    assert "Fix: " in line


def test_float8_is_inherited_but_not_where_log_ratios_are_trained(tmp_path: Path) -> None:
    found = load(write_recipe(tmp_path, CHAT), [FLOAT8, "cluster={gpu: H100}"])
    precisions = {name: one.settings.precision.linear for name, one in resolve(found, order(found)).items()}
    assert {precisions[name] for name in ("pretrain", "cooldown", "longer/2", "sft")} == {"float8"}
    assert {precisions[name] for name in ("qrpo", "dpo")} == {"param"}


def fields(processes: int, parallel: Parallel, length: int = 4096, batch: int = 1024) -> list[str]:
    launch = Launch(processes=processes, parallel=parallel)
    return [misfit.field for misfit in misfits(launch, ModelSpec(flavour="70b"), length, batch)]


def test_the_layouts_of_a_published_size_are_allowed_up_to_its_heads_and_layers() -> None:
    assert fields(512, Parallel(tp=8, sequence_parallel=True)) == []
    assert fields(512, Parallel(tp=16)) == ["tp"]  # 8 key heads
    assert fields(512, Parallel(tp=4, pp=8)) == []
    assert fields(512, Parallel(tp=4, pp=8, pp_schedule="interleaved-1f1b")) == []
    assert fields(512, Parallel(pp=64, pp_schedule="interleaved-1f1b")) == ["pp"]  # 128 stages of 80 layers
    published = Parallel(tp=4, pp=8, pp_schedule="interleaved-1f1b", virtual_stages=5)
    assert fields(512, published, batch=16 * 32) == []  # fewer micro-batches than its 40 stages
    assert fields(512, published.model_copy(update={"virtual_stages": 6})) == ["virtual_stages"]
    assert fields(512, published.model_copy(update={"pp_schedule": "1f1b"})) == ["virtual_stages"]
    assert fields(512, Parallel(cp=8, tp=2, sequence_parallel=True)) == []
    assert fields(512, Parallel(cp=8, tp=2, sequence_parallel=True), length=4096 + 16) == ["cp"]
    assert fields(512, Parallel(tp=4, sequence_parallel=True), length=4098) == ["sequence_parallel"]
    assert fields(512, Parallel(pp=8), batch=256) == ["pp"]  # 4 sequences for 8 stages


@pytest.mark.parametrize("pp", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("schedule", "each"), [("1f1b", 1), ("gpipe", 1), ("interleaved-1f1b", 2), ("interleaved-1f1b", 5)]
)
def test_the_micro_batch_is_the_largest_that_the_schedule_takes(pp: int, schedule: Any, each: int) -> None:
    parallel = Parallel(pp=pp, pp_schedule=schedule, virtual_stages=each if each > 2 else None)
    stages = 1 if pp == 1 else pp * each
    for share in range(1, 40):
        for limit in (None, 1, 2, 5):
            fit = []
            for size in range(1, min(limit or share, share) + 1):
                number = share // size
                rounds = max(1, number // pp) if stages > pp else 1  # torch's ScheduleInterleaved1F1B
                enough = number >= stages or (size == 1 and number >= pp)
                if share % size == 0 and enough and number % rounds == 0:
                    fit.append(size)
            assert micro_batch_size(parallel, share, limit) == (max(fit) if fit else None), (share, limit)
