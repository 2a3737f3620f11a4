"""`apertus rehearse`: which ranks, what it prints, and with which code it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from apertus_model.rehearsal import fake_cuda
from apertus_model.rehearsal.rates import Rates
from apertus_model.rehearsal.records import KINDS, RankTask, Rehearsed
from flows.cli.__main__ import app
from flows.execution.rehearsal import Rehearsal, parts_to_rehearse, ranks_of, run_ranks, work_of
from flows.planning.estimate import flops, step_time
from flows.planning.estimate.memory import memory_of_rank
from flows.planning.estimate.step_time import RankWork
from flows.planning.plan import Plan, make
from infra.store import Store
from specs.launch import Parallel
from specs.model import ModelSpec
from specs.optimizer import OptimizerSpec
from specs.recipe import load
from specs.settings import Lora
from specs.stages.reward_model import RewardLoss, RewardSegment
from tests.flows.planning.segments import segment
from tests.recipes import RECIPE
from tools.rehearsals import speed

ROOT = Path(__file__).parents[3]
RECIPES = sorted(path.stem for path in (ROOT / "specs" / "recipes").glob("*.yaml"))

SHALLOW = "--set", "stages.pretrain.model.n_layers=8"

needs_compiler = pytest.mark.skipif(
    not fake_cuda.possible(), reason=f"no {fake_cuda.COMPILER}, which compiles the fake CUDA"
)


def planned(name: str, folder: Path, *overrides: str) -> Plan:
    pipeline = load(str(ROOT / "specs" / "recipes" / f"{name}.yaml"), list(overrides))
    return make(pipeline, Store.open(str(folder)), lambda name, listing: None, ask_network=False)


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    documents = tmp_path / "documents"
    documents.mkdir()
    for number in range(20):
        (documents / f"{number}.txt").write_text("a few words of a note\n" * 50)
    path = tmp_path / "tiny.yaml"
    path.write_text(RECIPE.format(documents=documents))
    return str(path)


def run(*arguments: str, store: Path) -> Any:
    return CliRunner().invoke(app, ["rehearse", *arguments, "--store", str(store / "store")])


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The first part of the pretraining of the 8B with fewer layers, as JSON."""
    folder = tmp_path_factory.mktemp("shipped")
    recipe = str(ROOT / "specs" / "recipes" / "apertus-8b.yaml")
    result = run(recipe, "pretrain", "--part", "0", *SHALLOW, "--json", store=folder)
    assert result.exit_code == 0, result.output
    found: str = result.stdout
    return found


@needs_compiler
def test_the_json_is_what_its_model_says(shipped: str) -> None:
    document = json.loads(shipped)
    found = Rehearsal.model_validate(document, strict=False)
    assert json.loads(found.model_dump_json()) == document
    (part,) = found.parts
    assert (part.part, part.gpus, part.gpu, part.bubble) == ("pretrain/1", 1024, "GH200", 0.0)
    (rank,) = part.ranks
    built = rank.report.rehearsed
    assert built is not None and rank.report.failure is None
    assert set(built.memory.kinds) == set(KINDS) and built.memory.total == sum(built.memory.kinds.values())
    assert rank.memory_difference == rank.planned_memory["total"] / built.memory.total - 1
    assert part.step_seconds == pytest.approx(built.seconds)
    assert built.seconds == pytest.approx(built.compute_seconds + built.waited_seconds)
    assert built.compute_seconds == pytest.approx(sum(built.kinds.values()))
    assert part.tokens_per_second_per_gpu == pytest.approx(1024 * 4096 / 1024 / built.seconds)


@needs_compiler
def test_the_moments_of_a_step_have_its_peak(shipped: str) -> None:
    (part,) = Rehearsal.model_validate_json(shipped).parts
    built = part.ranks[0].report.rehearsed
    assert built is not None
    moments = built.memory.moments
    assert max(sum(moment.kinds) for moment in moments) == built.memory.total
    assert [moment.seconds for moment in moments] == sorted(moment.seconds for moment in moments)
    assert len(moments) > 100 and moments[-1].seconds <= built.compute_seconds


# With these optimizers the host also waits for the GPU in another file.
OTHER_WAITS = {
    "mars": "apertus_model/optimizers/benchmark/library.py",
    "prodigy": "apertus_model/optimizers/benchmark/library.py",
    "sophia": "apertus_model/losses/cross_entropy.py",
}


def within(found: Rehearsal, recipe: str, folder: Path, *overrides: str) -> None:
    """Memory within 5% of the plan's; the speed of the published ones within 15% of the formulas'; and the
    host waits for the GPU once in a step."""
    plan = planned(recipe, folder, *overrides)
    estimates = {part.node.name: part for part in plan.estimates.parts}
    for part in found.parts:
        estimate = estimates[part.part]
        other_file = OTHER_WAITS.get(estimate.segment.optimizer.name)
        for rank in part.ranks:
            built = rank.report.rehearsed
            assert built is not None and rank.memory_difference is not None
            assert abs(rank.memory_difference) < 0.05, (part.part, rank.rank)
            waits = [
                (file, line.what, line.calls)
                for line in built.synchronisations
                if (file := line.place.split(":")[0]) != other_file
            ]
            assert waits == [("apertus_model/trainer/lifecycle.py", "tolist", 1)], (part.part, rank.rank)
        if plan.pipeline.cluster is not None and recipe in ("apertus-8b", "apertus-70b"):
            assert part.tokens_per_second_per_gpu == pytest.approx(
                speed(estimate, plan.pipeline.cluster), rel=0.15
            ), part.part


@needs_compiler
def test_layers_of_the_8b_take_what_is_planned(shipped: str, tmp_path: Path) -> None:
    within(Rehearsal.model_validate_json(shipped), "apertus-8b", tmp_path, SHALLOW[1])


SMALL = ModelSpec(dim=512, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=128, ffn_dim=2048, vocab_size=4096)


def counted_and_planned(world: int, **changes: Any) -> tuple[Rehearsed, RankWork]:
    """The first rank of a small model with few tokens, by a rehearsal, and as formulas see it."""
    one = segment(
        **{"model": SMALL, "sequence_length": 16, "micro_batch_size": 1, "precision": {"param": "bfloat16"},
           **changes},
    )  # fmt: skip
    fields = {"segment": one.model_dump(mode="json"), "world_size": world, "rank": 0}
    (report,) = run_ranks([RankTask(kind="pretrain", gpu="H100", gpus_per_node=8, **fields)])
    assert report.rehearsed is not None, report.failure
    return report.rehearsed, RankWork(one, world, 0, Rates("H100", 8))


@needs_compiler
@pytest.mark.parametrize(
    "optimizer",
    [
        {"name": "adamw"},
        {"name": "ademamix"},
        pytest.param({"name": "ademamix", "state_dtype": "bfloat16"}, marks=pytest.mark.slow),
        pytest.param({"name": "muon"}, marks=pytest.mark.slow),
        pytest.param({"name": "d-muon"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_an_update_moves_what_is_planned(optimizer: dict[str, Any]) -> None:
    """Those of other optimizers: tests/apertus_model/rehearsal/test_costs.py, since a rehearsal's step is
    their first one, which makes their states."""
    spec = OptimizerSpec(lr=1e-3, **optimizer).resolved({})
    counted, rank = counted_and_planned(1, optimizer=spec, global_batch_size=1)
    assert counted.classes["optimizer"] == pytest.approx(step_time.update(rank), rel=0.001)


COPIES = (
    "_foreach_copy_", "all_gather_copy_in", "split_with_sizes_copy", "copy_", "chunk_cat", "div", "_to_copy",
    "add_",
)  # fmt: skip


@needs_compiler
@pytest.mark.parametrize(
    ("world", "parallel", "param"),
    [
        (8, {}, "bfloat16"),
        pytest.param(8, {}, "float32", marks=pytest.mark.slow),
        pytest.param(8, {"reshard_after_forward": "never"}, "bfloat16", marks=pytest.mark.slow),
        pytest.param(8, {"pp": 2}, "bfloat16", marks=pytest.mark.slow),
        pytest.param(4, {"dp_replicate": 4}, "bfloat16", marks=pytest.mark.slow),
        pytest.param(1, {}, "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_copies_of_weights_and_sums_of_gradients_move_what_is_planned(
    world: int, parallel: dict[str, Any], param: str
) -> None:
    """Four micro-batches of a rank. A few of the casts and sums are those of the loss and of activations."""
    batch = 4 * world // parallel.get("pp", 1)
    counted, rank = counted_and_planned(
        world, parallel=parallel, global_batch_size=batch, precision={"param": param}
    )
    seconds = sum(line.seconds for line in counted.operators if line.operator in COPIES)
    around = step_time.TIMES["weights"](rank) * step_time.copies(rank)
    planned = around + step_time.sums(rank) + step_time.weights_alone(rank)
    assert seconds == pytest.approx(planned, rel=0.05)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    ("recipe", "launch", "least"),
    [
        ("apertus-8b", "{processes: 1024, parallel: {tp: 4, pp: 2, sequence_parallel: true}}", 0.7),
        ("apertus-70b", None, 0.75),
    ],
)
def test_operators_that_only_move_leave_most_of_an_h100_to_products(
    recipe: str, launch: str | None, least: float, tmp_path: Path
) -> None:
    """Without compilation; the 8B recomputes selectively. With a pass of its own for each operator of xIELU
    and of RoPE it was 52% and 64%."""
    path = str(ROOT / "specs" / "recipes" / f"{recipe}.yaml")
    changes = ["--set", f"stages.pretrain.launch={launch}", "--set",
               "stages.pretrain.activation_checkpointing=selective"] if launch else []  # fmt: skip
    result = run(path, "pretrain", "--part", "0", "--gpu", "H100", *changes, "--json", store=tmp_path)
    (part,) = Rehearsal.model_validate_json(result.stdout).parts
    for rank in part.ranks:
        assert rank.report.rehearsed is not None and rank.report.rehearsed.bound >= least
        assert rank.memory_difference is not None and abs(rank.memory_difference) < 0.05


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("lora", [None, Lora(rank=16, alpha=32)])
def test_a_reward_model_builds_and_takes_the_memory_that_is_planned(lora: Lora | None) -> None:
    """No recipe that is shipped trains one. Layers of the 8B."""
    base = segment("8b", global_batch_size=16, micro_batch_size=1, precision={"param": "bfloat16"})
    model = base.model.model_copy(update={"head": "reward", "n_layers": 4})
    fields = base.model_dump() | {"model": model, "loss": RewardLoss(), "lora": lora}
    spec = RewardSegment.model_validate(fields)
    task = RankTask(
        kind="reward_model", segment=spec.model_dump(mode="json"), world_size=8, rank=0, gpu="H100",
        gpus_per_node=8,
    )  # fmt: skip
    (report,) = run_ranks([task])
    found = report.rehearsed
    assert found is not None
    assert memory_of_rank(spec, 8, 0).total == pytest.approx(found.memory.total, rel=0.05)
    assert [(line.what, line.calls) for line in found.synchronisations] == [("tolist", 1)]


@pytest.mark.slow
@needs_compiler
def test_segments_that_differ_in_their_borders_alone_are_rehearsed_once(tiny: str, tmp_path: Path) -> None:
    """Three of 4, 4 and 8 sequences a step."""
    result = run(tiny, "pretrain", "--json", store=tmp_path)
    parts = Rehearsal.model_validate_json(result.stdout).parts
    assert len(parts) == 3
    assert result.stderr.count("rehearsing") == 2
    reports = [part.ranks[0].report for part in parts]
    assert reports[0] == reports[1] != reports[2]


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"start_step": 8, "end_step": 12, "start_tokens": 64}, True),
        ({"goldfish": None}, True),
        ({"checkpoint": {"interval": 7}}, True),
        ({"validation": {"interval": 12345}}, True),
        ({"optimizer": {"lr": 1e-5}}, True),
        ({"optimizer": {"name": "adamw", "lr": 1e-3}}, False),
        ({"global_batch_size": 4096}, False),
        ({"compile": True}, False),
        ({"parallel": {"tp": 4}}, False),
    ],
)
def test_tasks_whose_steps_do_the_same_are_one(change: dict[str, Any], same: bool, tmp_path: Path) -> None:
    segment = planned("apertus-8b", tmp_path).estimates.stages["pretrain"].parts[0].segment
    plain = segment.model_dump(mode="json")
    changed = plain | {
        name: plain[name] | value if isinstance(value, dict) else value for name, value in change.items()
    }
    assert changed != plain
    works = {
        work_of(RankTask(kind="pretrain", segment=fields, world_size=8, rank=0, gpu="H100", gpus_per_node=8))
        for fields in (plain, changed)
    }
    assert (len(works) == 1) == same


@pytest.mark.slow
@needs_compiler
def test_tables_and_report_show_each_rank_and_the_largest_tensors(tiny: str, tmp_path: Path) -> None:
    layout, page = "stages.cooldown.launch={processes: 4, parallel: {pp: 2}}", tmp_path / "report.html"
    result = run(tiny, "cooldown", "--set", layout, "--gpu", "A100", "--report", str(page), store=tmp_path)
    assert result.exit_code == 0, result.output
    for text in (
        "cooldown: 4 GPUs",
        "largest tensors at the peak of rank",
        "reduce-scatter",
        "send",
        "on A100",
    ):
        assert text in result.output
    for text in ("Rehearsal of cooldown", "Collectives of a step of rank", "of the A100", "reduce-scatter"):
        assert text in page.read_text()


@pytest.mark.slow
@needs_compiler
def test_a_part_that_does_not_build_ends_with_one_message_and_code_1(tiny: str, tmp_path: Path) -> None:
    result = run(tiny, "cooldown", "--set", "stages.cooldown.attention=flash", store=tmp_path)
    assert result.exit_code == 1
    lines = [line for line in result.stdout.splitlines() if line.strip()]
    assert len(lines) == 1
    assert lines[0].startswith("rank 0 of 1 of cooldown does not build: AttentionBackendError: attention")
    assert "compute in bfloat16, this run in float32" in lines[0]
    assert "(apertus_model/model/attention_choice.py:" in lines[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["corpus"], "no stage 'corpus' trains in this recipe. Fix: use one of pretrain, cooldown"),
        (["pretrain", "--part", "9"], "stage 'pretrain' has no part 9. Fix: use 0 to"),
        (["--part", "0"], "--part 0 says which part of a stage. Fix: name the stage before it"),
        (["cooldown", "--rank", "1"], "there is no rank 1: the part has 1 processes"),
        (["cooldown", "--rank", "0", "--all-kinds-of-ranks"], "cannot be combined. Fix: leave one out"),
        (["cooldown", "--gpu", "H1000"], "no data sheet of a GPU 'H1000'. Fix: use one of"),
        (["cooldown", "--set", "stages.cooldown.launch.mfuu=1"], "mfuu"),
    ],
)
def test_a_mistake_ends_with_its_message_and_code_2(
    tiny: str, tmp_path: Path, arguments: list[str], message: str
) -> None:
    result = run(tiny, *arguments, store=tmp_path)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_the_ranks_that_differ_are_found(tmp_path: Path) -> None:
    """70B: 4,096 GPUs, pp 8, so 512 to a stage of the pipeline; FSDP over 128 cuts everything but the two
    scalars of xIELU into equal parts."""
    part = planned("apertus-70b", tmp_path).estimates.stages["pretrain"].parts[0]
    segment, world = part.segment, part.gpus
    assert ranks_of(segment, world, "first, middle and last") == [0, 512, 7 * 512]
    everything = ranks_of(segment, world, "all kinds")
    firsts = [stage * 512 for stage in range(8)]
    assert everything == sorted([*firsts, *(rank + 127 * 4 for rank in firsts)])
    assert ranks_of(segment, world, 17) == [17]
    # 80 layers, embedding and output are 11 for each of the first two stages, and 10 for the others
    alike = segment.model_copy(update={"parallel": Parallel(pp=8, tp=4, pp_schedule="gpipe")})
    assert [rank for rank in ranks_of(alike, world, "all kinds") if not rank % 512] == [0, 512, 1024, 3584]


@pytest.mark.parametrize("recipe", ["apertus-8b", "apertus-70b"])
def test_the_operations_of_all_ranks_are_those_of_the_part(recipe: str, tmp_path: Path) -> None:
    for part in planned(recipe, tmp_path).estimates.parts:
        segment, world, pp = part.segment, part.gpus, part.segment.parallel.pp
        each = [flops.of_rank(segment, world, rank) for rank in range(pp)]
        per_token = flops.training(segment) + flops.recomputation(segment)
        assert sum(each) * (world // pp) == pytest.approx(segment.tokens_per_step * per_token)


# Its longer batches fill the pipeline twice or once; to fill it eight times is the same work, for minutes.
SHORTER = {
    "apertus-70b": [
        "variables.long_batch_8k=1024", "variables.long_batch_16k=256", "variables.long_batch_32k=128",
        "variables.long_batch_64k=32",
    ]
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(3600)
@needs_compiler
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_shipped_builds_and_takes_the_memory_that_is_planned(recipe: str, tmp_path: Path) -> None:
    changes = SHORTER.get(recipe, [])
    words = [word for change in changes for word in ("--set", change)]
    result = run(str(ROOT / "specs" / "recipes" / f"{recipe}.yaml"), "--json", *words, store=tmp_path)
    assert result.exit_code == 0, result.output
    found = Rehearsal.model_validate_json(result.stdout)
    expected = planned(recipe, tmp_path, *changes).estimates.parts
    assert bool(found.parts) == bool(expected)  # a study of tokenizers has none
    within(found, recipe, tmp_path, *changes)


def test_parts_are_chosen_by_stage_and_number(tmp_path: Path) -> None:
    parts = planned("apertus-8b", tmp_path).estimates.parts
    names = [part.node.name for part in parts_to_rehearse(parts, None, None)]
    assert names == [part.node.name for part in parts]
    assert [part.node.name for part in parts_to_rehearse(parts, "sft", 0)] == ["sft"]
