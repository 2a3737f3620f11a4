"""What a plan says it takes: published numbers, arithmetic by hand, storage, utilisation of stored runs, two plans side by side."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flows.cli.tables import estimate as tables
from flows.planning.comparison import compare
from flows.planning.estimate import flops, storage
from flows.planning.estimate.memory import memory_of_step
from flows.planning.estimate.time_and_cost import spent
from flows.planning.estimate.timeline import spans
from flows.planning.graph import Graph, Input, Node
from flows.planning.plan import Plan, make
from infra.store import Attempt, Store
from infra.store.files import sinks
from infra.store.writing.retention import prune
from specs.cluster import GPUS, Cluster
from specs.errors import SpecError
from specs.intervals import young_daly
from specs.job import Job
from specs.launch import Launch, Parallel
from specs.model import ModelSpec
from specs.optimizer import OptimizerSpec
from specs.recipe import load
from specs.schedule import Schedule
from specs.stages.training import Segment
from tests.flows.conftest import finish
from tests.recipes import CHAT, write_recipe
from tools.published import plan_of

Planned = Callable[..., Plan]
CLUSTER = "cluster={gpu: H100, gpus_per_node: 2, mfu: 0.5, price_per_gpu_hour: 3, power_per_gpu: 500, pue: 1.2, storage_price: 20}"
JOB: dict[str, Any] = {
    **{"node": "pretrain", "kind": "pretrain", "version": 1, "fingerprint": "f", "spec": {}, "identity": {}, "inputs": {}, "launch": {}},
    **{"path": "pretrain/f", "attempt": "first", "progress": ""},
}


def segment(flavour: str = "8b", **changes: object) -> Segment:
    fields: dict[str, object] = {
        "model": ModelSpec(flavour=flavour),
        "sequence_length": 4096,
        "global_batch_size": 2048,
        "optimizer": OptimizerSpec(lr=1e-4).resolved({}),
        "schedule": Schedule(peak=1e-4),
        "end_step": 1000,
    }
    return Segment.model_validate({**fields, **changes})


def test_flops_are_those_of_the_report() -> None:
    """arXiv 2509.14233, appendix E: 6.74e24 for 70B over 15T tokens."""
    assert flops.training(segment("70b")) * 15e12 == pytest.approx(6.74e24, rel=1e-3)


@pytest.mark.parametrize("flavour", ["1.5b", "8b", "70b"])
def test_flops_are_six_times_the_parameters_and_twelve_times_the_scores(flavour: str) -> None:
    """PaLM (arXiv 2204.02311, appendix B): 6 N + 12 L Q S, N without the input embedding; norms and scalars are not in matrices."""
    model = ModelSpec(flavour=flavour)
    inside = model.parameters - model.vocab_size * model.dim
    scores = 12 * model.n_layers * model.n_heads * model.head_dim * 4096
    assert flops.training(segment(flavour)) == pytest.approx(6 * inside + scores, rel=1e-4)
    assert flops.training(segment(flavour)) == model.flops_per_token(4096)


def test_hours_energy_and_cost_follow_from_the_utilisation() -> None:
    """989.5 TFLOP/s at one half for an hour, on two GPUs."""
    cluster = Cluster(gpu="H100", mfu=0.5, price_per_gpu_hour=3, power_per_gpu=500, pue=1.2)
    assert spent(989.5e12 * 3600, 2, 0.5, cluster) == pytest.approx((3600.0, 2.0, 1.2, 6.0))
    assert spent(1e20, 2, None, cluster) == (None, None, None, None)
    assert spent(1e20, 2, 0.5, Cluster(gpu="H100", mfu=0.5)).cost is None


def test_the_published_throughput_of_70b_is_its_published_gpu_hours() -> None:
    """Report: 723 tokens per second and GPU on GH200, about 6 million GPU-hours in all."""
    per_token = flops.training(segment("70b"))
    mfu = 723 * per_token / GPUS["GH200"].bf16_flops
    assert mfu == pytest.approx(0.328, abs=1e-3)
    hours = spent(15e12 * per_token, 4096, mfu, Cluster(gpu="GH200")).gpu_hours
    assert hours == pytest.approx(15e12 / 723 / 3600)
    assert hours == pytest.approx(6e6, rel=0.05)


def test_a_checkpoint_holds_float32_weights_and_the_states() -> None:
    adamw = segment(optimizer=OptimizerSpec(name="adamw", lr=1e-4).resolved({}))
    rounded = segment(optimizer=OptimizerSpec(lr=1e-4, state_dtype="bfloat16").resolved({}))
    parameters = 8_053_338_176
    found = [storage.checkpoint_bytes(each) for each in (adamw, segment(), rounded)]
    assert found == [12 * parameters, 16 * parameters, 10 * parameters]


@pytest.mark.parametrize(
    "settings",
    [
        {"interval": 10, "keep": 2},
        {"interval": 10, "keep": 3, "milestones": [20, 50, 57, 100, 125]},
        {"interval": 10, "keep": 1, "keep_every": 25},
        {"interval": 1000, "keep": 2, "keep_every": 15, "milestones": [31]},
        {"interval": 1000, "keep": 2},
    ],
)
@pytest.mark.parametrize("rollback", [None, {"rollback_interval": 20, "rollback_margin": 45}])
def test_planned_checkpoints_are_those_that_pruning_keeps(
    tmp_path: Path, settings: dict[str, object], rollback: dict[str, int] | None
) -> None:
    anomalies = {"nonfinite": "rollback", **rollback} if rollback else {}
    spec = segment(start_step=30, end_step=125, checkpoint=settings, anomalies=anomalies)
    store = Store.open(f"memory://{tmp_path.name}")
    store.initialise()
    writing = Attempt(Job(**{**JOB, "store": store.url, "scratch": str(tmp_path)}), store)
    writing.begin()
    written, most = [spec.start_step], 0
    for step in range(31, 126):
        if spec.checkpoint_due(step) or step == spec.end_step:
            with store.writer(writing.folder(f"{Attempt.checkpoint_folder(step)}/shard.bin")) as file:
                file.write(b"weights")
            writing.commit_checkpoint(step, {}, files={"shard.bin": file.record})
            written.append(step)
            most = max(most, len(writing.artifact.checkpoint_steps()))
            back = spec.anomalies.rollback_from(step, spec.start_step)
            prune(writing.artifact, keep=spec.checkpoint.keep, kept=lambda old, back=back: spec.checkpoint.kept(old) or back <= old)
    found = storage.checkpoints(spec, None)
    kept, gap = len(writing.artifact.checkpoint_steps()), max(after - before for before, after in pairwise(written))
    assert (found.written, found.kept, found.most, found.gap) == (len(written) - 1, kept, most, gap)


def test_the_best_checkpoint_by_each_metric_is_one_more_at_most() -> None:
    found = [
        storage.checkpoints(segment(end_step=end, checkpoint={"interval": 100, "keep": 1, "best": best}), None)
        for end, best in ((1000, []), (1000, ["val_loss", "val_loss/a"]), (100, ["val_loss"]))
    ]
    assert [(saved.written, saved.kept, saved.most) for saved in found] == [(10, 1, 2), (10, 3, 4), (1, 1, 1)]


def test_an_interval_that_is_a_time_is_counted_in_steps() -> None:
    timed = segment(end_step=1000, checkpoint={"interval": "10 min", "milestones": [7]})
    assert storage.written_steps(timed, 3.0) == [7, 200, 400, 600, 800, 1000]
    assert storage.written_steps(timed, None) == [7, 1000]


def test_the_interval_that_wastes_least_is_that_of_the_copy_and_no_shorter_than_the_upload() -> None:
    """16 bytes for each of 8.05B parameters, 64 processes, two copies of each shard: 4.03 GB to a GPU, at 10 GB/s; 129 GB at 20 GB/s."""
    cluster = {"gpu": "H100", "gpus_per_node": 8, "storage_bandwidth": 20, "host_bandwidth": 10, "mean_time_between_failures": "8d"}
    spec = segment(parallel=Parallel(dp_replicate=2))
    saved = storage.checkpoints(spec, 2.0)
    size = 16 * 8_053_338_176
    found = storage.saving(spec, 64, saved, 2.0, Cluster.model_validate(cluster))
    assert (found.copy, found.upload, found.interval) == pytest.approx((size / 32 / 10e9, size / 20e9, 200.0))
    assert found.best == pytest.approx(young_daly(size / 32 / 10e9, 86_400))
    slow = storage.saving(spec, 64, saved, 2.0, Cluster.model_validate({**cluster, "storage_bandwidth": 0.1}))
    assert slow.best == slow.upload == pytest.approx(size / 0.1e9)
    for missing in ("storage_bandwidth", "host_bandwidth", "mean_time_between_failures"):
        less = Cluster.model_validate({name: value for name, value in cluster.items() if name != missing})
        assert storage.saving(spec, 64, saved, 2.0, less).best is None


def test_parts_run_side_by_side_as_far_as_inputs_nodes_and_concurrency_allow() -> None:
    graph = Graph()
    for name, parents in {"data": (), "a": ("data",), "b": ("data",), "c": ("data",), "ab": ("a", "b")}.items():
        read = {parent: Input("pretrain", parent, parent, parent, 1) for parent in parents}
        graph.nodes[name] = Node(name, name, "pretrain", 1, segment(seed=len(graph.nodes)), read, Launch())
    seconds = {"a": 3.0, "b": 5.0, "c": 1.0, "ab": 2.0}
    nodes = {"a": 2, "b": 2, "c": 1, "ab": 4}

    def ends(concurrency: int, available: int) -> dict[str, float]:
        return {name: span.end for name, span in spans(graph, seconds, nodes, concurrency, available).items()}

    assert ends(1, 9) == {"a": 3, "b": 8, "c": 9, "ab": 11}
    assert ends(9, 9) == {"a": 3, "b": 5, "c": 1, "ab": 7}
    assert ends(2, 9) == {"a": 3, "b": 5, "c": 4, "ab": 7}
    assert ends(9, 3) == {"a": 3, "c": 1, "b": 8, "ab": 10}  # `c` fits beside `a`; `ab` asks for more than there is, and gets all
    graph.after["c"] = ("ab",)
    assert ends(9, 9) == {"a": 3, "b": 5, "ab": 7, "c": 8}


def test_wall_clock_of_variants_depends_on_the_nodes() -> None:
    """Four stages of eight nodes at a time on 32: no faster than all GPUs always busy, and no slower than half of them."""
    plan = plan_of("wso")
    totals = plan.estimates.totals()
    busy = totals["gpu_hours"] * 3600 / 256
    assert busy < totals["seconds"] < 2 * busy
    assert plan_of("apertus-8b").estimates.seconds == pytest.approx(
        sum(part.spent.seconds or 0 for part in plan_of("apertus-8b").estimates.parts)
    )


class Bucket:
    """A store, and the client of its server, that counts what is asked."""

    def __init__(self) -> None:
        self.requests, self.fs = 0, self

    def full(self, path: str) -> str:
        return path

    def call(self, what: str, work: Callable[[], Any], size: int = 0) -> Any:
        return work()

    def split_path(self, path: str) -> tuple[str, str, None]:
        return "bucket", path, None

    def call_s3(self, method: str, **arguments: object) -> dict[str, str]:
        self.requests += 1
        return {"UploadId": "1", "ETag": "1"}

    def pipe_file(self, path: str, data: bytes) -> None:
        self.requests += 1


@pytest.mark.parametrize("size", [0, 3, 4, 5, 8, 9, 23, 24, 25, 60])
def test_requests_are_those_that_writing_the_file_makes(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(sinks, "PART_BYTES", 4)
    monkeypatch.setattr(sinks, "PARTS_OF_A_SIZE", 2)  # so that parts are 4, 4, 8, 8, 16, ... bytes
    bucket, left = Bucket(), size
    sink = sinks.MultipartSink(bucket, "file")  # type: ignore[arg-type]
    while left >= sink.next_length():
        length = sink.next_length()
        sink.put(bytes(length))
        left -= length
    sink.finish(bytes(left))
    digests = 1 if size >= 4 else 0
    assert storage.REQUESTS(1, size).put - storage.REQUESTS(1, 0).put == bucket.requests + digests - 1


def test_requests_of_a_checkpoint_are_those_that_a_server_saw() -> None:
    # docs/object_storage.md: two ranks, a small file each, 4 PUT, 3 GET, 3 HEAD, 2 LIST; here one PUT and one HEAD more for DCP's index
    found = storage.REQUESTS(2, 1000)
    assert (found.put, found.get, found.head, found.list) == (5, 3, 4, 2)
    assert storage.REQUESTS(2, 2 * 40 * 2**20).put == 2 * (3 + 3) + 3  # 40 MiB are 3 parts of 16 MiB


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ({"micro_batch_size": 1}, {"micro_batch_size": 4}),
        ({"activation_checkpointing": "full"}, {"activation_checkpointing": "selective"}),
        ({"activation_checkpointing": "selective"}, {"activation_checkpointing": "none"}),
        ({"parallel": Parallel(tp=4, sequence_parallel=True)}, {"parallel": Parallel(tp=4)}),
        ({"parallel": Parallel(tp=4)}, {"parallel": Parallel(tp=2)}),
        ({"parallel": Parallel(cp=2)}, {}),
        ({}, {"parallel": Parallel(dp_replicate=64)}),
        ({"parallel": Parallel(pp=4)}, {"parallel": Parallel(pp=4, pp_schedule="gpipe")}),
    ],
)
def test_memory_settings_reduce_estimated_memory(less: dict[str, object], more: dict[str, object]) -> None:
    found = [memory_of_step(segment(**{"micro_batch_size": 2, **changes}), 64).total for changes in (less, more)]
    assert found[0] < found[1]


def test_weights_and_states_are_sharded_over_all_but_replicas() -> None:
    memory = memory_of_step(segment(parallel=Parallel(dp_replicate=2, tp=2), micro_batch_size=1), 16)
    parameters = 8_053_338_176
    assert memory.weights == pytest.approx(4 * parameters / 8, rel=1e-3)
    assert memory.optimizer_states == pytest.approx(12 * parameters / 8, rel=1e-3)


def test_plan_sums_estimates_of_its_stages(planned: Planned) -> None:
    document = planned(CLUSTER, "launch.mfu=0.25", "stages.cooldown.launch.mfu=0.5").to_json()["estimates"]
    stages, totals = document["stages"], document["totals"]
    assert list(stages) == ["pretrain", "cooldown"]
    pretrain, cooldown = stages["pretrain"], stages["cooldown"]
    assert (pretrain["mfu"], cooldown["mfu"], pretrain["mfu_source"]) == (0.25, 0.5, "stated")
    assert pretrain["tokens"] == (12 * 4 + 4 * 8) * 32 and pretrain["sequences"] == 12 * 4 + 4 * 8 and pretrain["steps"] == 16
    hours = pretrain["flops"] / (0.25 * 989.5e12) / 3600
    assert pretrain["gpu_hours"] == pytest.approx(hours)
    assert pretrain["energy_kwh"] == pytest.approx(hours * 0.5 * 1.2) and pretrain["cost"] == pytest.approx(3 * hours)
    for name in ("tokens", "steps", "flops", "gpu_hours", "seconds", "energy_kwh", "cost"):
        assert totals[name] == pytest.approx(pretrain[name] + cooldown[name])
    series = [part["stored_bytes_after"] for stage in stages.values() for part in stage["parts"]]
    each = pretrain["checkpoint"]["bytes"]
    assert series == [2 * each, 4 * each, 6 * each, 8 * each]  # steps 5 and 8, 10 and 12, 15 and 16, 4 and 6
    assert totals["stored_bytes"] == totals["peak_storage_bytes"] == series[-1]
    assert [(part["start_step"], part["end_step"], part["start_tokens"], part["end_tokens"]) for part in pretrain["parts"]] == [
        (0, 8, 0, 1024), (8, 12, 1024, 1536), (12, 16, 1536, 2560),
    ]  # fmt: skip
    assert totals["masked_labels"] == 1024 // 50 + 512 // 50 + 1024 // 50 + 1536 // 50
    # Whole checkpoints by two segments and the cooldown, which carries the states; weights, a quarter of them, by evaluation and export.
    assert totals["checkpoint_loads"] == 5 and totals["checkpoint_read_bytes"] == pytest.approx(3.5 * each, rel=1e-3)
    assert totals["storage_cost_per_month"] == pytest.approx(totals["stored_bytes"] / 1e12 * 20)
    assert pretrain["fits"] and pretrain["memory_limit_bytes"] == 80e9
    parts = {name: value for name, value in pretrain["memory_bytes"].items() if name not in ("total", "moment")}
    assert sum(parts.values()) == pretrain["memory_bytes"]["total"]


def test_estimates_that_depend_on_a_cluster_are_unknown_without_one(planned: Planned) -> None:
    document = planned().to_json()["estimates"]
    assert document["cluster"] is None
    assert [document["totals"][name] for name in ("gpu_hours", "seconds", "energy_kwh", "cost")] == [None] * 4
    assert document["totals"]["flops"] > 0 and document["stages"]["pretrain"]["fits"] is None


def test_utilisation_is_measured_on_what_is_stored(planned: Planned) -> None:
    """Half of what is stored is of a stage, the other stage takes its number over."""
    measuring = "cluster={gpu: H100}"
    assert planned(measuring).to_json()["estimates"]["stages"]["pretrain"]["mfu"] is None
    plan = planned(measuring)
    finish(plan, "pretrain/1", "pretrain/2", "pretrain/3", metrics={"tokens_per_second": 1e6})
    stages = planned(measuring).to_json()["estimates"]["stages"]
    node = plan.graph.nodes["pretrain/1"]
    expected = 1e6 * node.flops / node.tokens / 989.5e12
    assert (stages["pretrain"]["mfu"], stages["pretrain"]["mfu_source"]) == (pytest.approx(expected), "measured")
    assert (stages["cooldown"]["mfu"], stages["cooldown"]["mfu_source"]) == (pytest.approx(expected), "measured elsewhere")
    changed = planned(measuring, "stages.pretrain.optimizer.lr=2e-2").to_json()["estimates"]["stages"]["pretrain"]
    assert changed["mfu_source"] == "measured"  # by the last run under the same names


def test_work_that_two_stages_share_is_counted_once(planned: Planned, tmp_path: Path, store: Store) -> None:
    text = write_recipe(tmp_path).read_text()
    duplicate = text + "  again: {kind: cooldown, from: pretrain, mixture: main, budget: 6 steps}\n"
    (tmp_path / "duplicate.yaml").write_text(duplicate)
    assert make(load(tmp_path / "duplicate.yaml"), store).estimates.totals()["flops"] == planned().estimates.totals()["flops"]


def test_two_plans_are_compared_by_fields_and_totals(planned: Planned) -> None:
    longer = planned("stages.cooldown.budget=12 steps", CLUSTER)
    found = compare(longer, planned())
    assert found.fields["stages.cooldown.budget"] == ("6 steps", "12 steps")
    assert found.fields["cluster.gpu"] == (None, "H100")
    assert set(found.fields) == {"stages.cooldown.budget", *(name for name in found.fields if name.startswith("cluster."))}
    before, now = found.totals["tokens"]
    assert now is not None and before is not None and now - before == 6 * 8 * 32
    assert found.totals["gpu_hours"][0] is None
    document = found.to_json()
    assert document["totals"]["tokens"]["difference"] == 6 * 8 * 32 and document["totals"]["cost"]["difference"] is None
    assert compare(longer, longer).fields == {}


@pytest.mark.parametrize("width", [80, 100, 140])
def test_tables_fit_the_terminal(tmp_path: Path, store: Store, width: int) -> None:
    plan = make(load(write_recipe(tmp_path, CHAT), [CLUSTER]), store)
    console = Console(width=width, file=io.StringIO())
    for table in (tables.estimate_table, tables.memory_table, tables.checkpoint_table):
        console.print(table(plan.estimates, width=width))
    console.print(tables.segment_table(plan.estimates, width))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= width
    for heading in ("GPU-hours", "per GPU", "total", "requests"):
        assert any(heading in line for line in lines)
    assert sum(line.lstrip().startswith("longer ") for line in lines) == 3


def test_units_are_readable() -> None:
    assert [tables.duration(seconds) for seconds in (None, 30, 720, 15_000, 5_071_680)] == ["-", "30 s", "12 min", "4.17 h", "58.7 d"]
    assert [tables.energy(kwh) for kwh in (None, 3.23e6, 214, 0.002)] == ["-", "3.23 GWh", "214 kWh", "2 Wh"]
    assert tables.size(1.13e12) == "1.13 TB"


def test_a_utilisation_above_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"cluster\.mfu"):
        load(write_recipe(tmp_path), ["cluster={gpu: H100, mfu: 36}"])


def test_the_command_compares_two_recipes(tmp_path: Path, store: Store) -> None:
    recipe = write_recipe(tmp_path)
    other = tmp_path / "other.yaml"
    other.write_text(recipe.read_text().replace("budget: 6 steps", "budget: 9 steps"))
    command = [sys.executable, "-m", "flows.cli", "plan", str(recipe), "--against", str(other), "--store", store.url, "--json"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert found["fields"]["stages.cooldown.budget"] == {"against": "9 steps", "this": "6 steps"}
