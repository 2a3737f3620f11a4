"""Time, energy and cost of sampling and scoring, and their place in the totals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from apertus_model.rehearsal.rates import Rates, clock
from flows.planning.estimate.decode_time import Replica, decode_seconds
from flows.planning.estimate.inference import gpus_of
from flows.planning.plan import Plan
from infra.store import Store
from specs.cluster import Cluster
from specs.launch import Launch, Parallel, Workers
from specs.stages.evaluate import EvaluatePart
from specs.stages.harness import HarnessPart, Suite
from tests.flows.conftest import finish
from tests.flows.planning.advising import Advised, plan_of
from tests.flows.planning.estimate.test_work import DECLARED, EXPECTED, parts
from tests.recipes import CHAT, CLUSTER
from tools.published import plan_of as published

Chat = Callable[..., Plan]


def test_time_is_that_of_the_forward_passes_and_of_decoding(chat: Chat) -> None:
    """The exported weights are float32; log-probabilities are made by all processes, as trained."""
    launch = "stages.preferences.launch={processes: 2, workers: {count: 1}}"
    plan = chat(CLUSTER, DECLARED, *EXPECTED, launch)
    found = parts(plan)
    model = plan.graph.trajectories["sft"].model
    work = next(part.work for part in plan.estimates.asking if part.node.name == "preferences/completions")
    # a batch of 32 prompts and four completions each decodes to the end of the longest
    decoding = decode_seconds(Replica(model, 1, 4, Rates("H100", 2)), 128, 128, 20, 16)
    assert decoding is not None
    expected = work.forward_flops / (0.5 * 67e12) + decoding
    completions, scored = found["completions"], found["log_probabilities"]
    assert (completions["seconds"], completions["time_source"]) == (pytest.approx(expected), "roofline")
    assert (completions["gpus"], scored["gpus"]) == (1, 2)
    assert scored["seconds"] == pytest.approx(scored["flops"] / (0.5 * 67e12 * 2))
    assert completions["gpu_hours"] == pytest.approx(expected / 3600)
    assert completions["cost"] == pytest.approx(3 * expected / 3600)
    assert completions["energy_kwh"] == pytest.approx(expected / 3600 * 0.5 * 1.2)


def test_workers_share_the_requests_of_a_suite(chat: Chat) -> None:
    def planned(launch: str, engine: str = "vllm") -> dict[str, Any]:
        tasks = "tasks: [stdlib_functions], expected: {requests: 1000, tokens: 20, new_tokens: 10}"
        suites = f"include: installed:examples/tasks, engine: {engine}, suites: {{own: {{{tasks}}}}}"
        stated = (f"stages.evaluate.harness={{{suites}}}", f"stages.evaluate.launch={launch}")
        return parts(chat(CLUSTER, DECLARED, *EXPECTED, *stated), "evaluate")["harness/own"]

    one, five = planned("{workers: {count: 1}}"), planned("{workers: {count: 5}}")
    assert (one["gpus"], five["gpus"]) == (1, 5)
    # 1,000 answers are 256 at a time on one GPU, and 200 at a time on each of five
    assert one["seconds"] / 5 < five["seconds"] < one["seconds"] / 3
    launch = Launch(workers=Workers(count=5), processes=2, parallel=Parallel(tp=2))
    assert gpus_of(HarnessPart(suite=Suite(tasks=["x"])), launch, None) == 10
    # with transformers one of the GPUs of a worker computes at a time, and workers compute side by side
    one, five = (planned(f"{{workers: {{count: {count}}}}}", "transformers") for count in (1, 5))
    assert one["seconds"] / 5 <= five["seconds"] < one["seconds"] / 3


def test_without_a_count_the_workers_of_a_plan_fill_a_node_as_those_of_a_run_do() -> None:
    suite, node = HarnessPart(suite=Suite(tasks=["x"])), Cluster(gpu="GH200", gpus_per_node=4)
    for tp, gpus in (1, 4), (2, 4), (3, 3), (4, 4), (8, 8):  # 8: of a node of four; advice says so
        assert gpus_of(suite, Launch(parallel=Parallel(tp=tp)), node) == gpus
    assert gpus_of(suite, Launch(workers=Workers(count=2)), node) == 2
    assert gpus_of(suite, Launch(), None) == 1  # a cluster that nobody described
    assert gpus_of(EvaluatePart.model_construct(), Launch(processes=16), node) == 16  # on the engine


def test_totals_have_training_and_inference(chat: Chat) -> None:
    document = chat(CLUSTER, DECLARED, *EXPECTED).to_json()
    estimates, totals = document["estimates"], document["estimates"]["totals"]
    every = [*estimates["stages"].values(), *estimates["inference"].values()]
    for name in ("flops", "gpu_hours", "energy_kwh", "cost"):
        assert totals[name] == pytest.approx(sum(stage[name] for stage in every))
        assert totals["inference"][name] == pytest.approx(
            sum(stage[name] for stage in estimates["inference"].values())
        )
    for name in ("read_tokens", "sampled_tokens"):
        assert totals[name] == sum(stage[name] for stage in estimates["inference"].values())
    assert document["totals"]["flops"] == document["totals"]["to_do"]["flops"] == totals["flops"]
    # one part runs at a time
    assert totals["seconds"] == pytest.approx(sum(stage["seconds"] for stage in every))


def test_the_speed_of_stored_completions_wins_where_utilisation_is_measured(chat: Chat) -> None:
    measuring = "cluster={gpu: H100, gpus_per_node: 1}"
    plan = chat(measuring, DECLARED, *EXPECTED)
    finish(plan, "pretrain/1", "pretrain/2", "pretrain/3", metrics={"tokens_per_second": 1e6})
    before = parts(chat(measuring, DECLARED, *EXPECTED))["completions"]
    assert before["time_source"] == "roofline"
    finish(plan, "preferences/completions", metrics={"mean_tokens": 5.0, "tokens_per_second": 4.0})
    found = parts(chat(measuring, DECLARED, *EXPECTED))["completions"]
    assert (found["time_source"], found["seconds"]) == ("measured", 32 * 4 * 5.0 / 4.0)
    more = "stages.preferences.completions.n=8"
    assert parts(chat(measuring, DECLARED, *EXPECTED, more))["completions"]["seconds"] == 32 * 8 * 5.0 / 4.0
    assert parts(chat(CLUSTER, DECLARED, *EXPECTED))["completions"]["time_source"] == "roofline"


def test_a_model_that_does_not_fit_has_no_time_and_leaves_that_of_the_others(
    tmp_path: Path, store: Store
) -> None:
    large = CHAT.replace(
        "{{dim: 32, n_layers: 2, n_heads: 2, n_kv_heads: 1, head_dim: 16, ffn_dim: 64, vocab_size: 512}}",
        "{{flavour: 70b}}",
    )
    plan = plan_of(
        tmp_path, store, CLUSTER, DECLARED, *EXPECTED, "stages.tokenizer.vocab_size=131072", recipe=large
    )
    found = parts(plan)["completions"]
    assert found["flops"] > 0 and found["seconds"] is None
    assert "does not fit" in found["not_counted"]
    assert plan.estimates.totals()["gpu_hours"] > 0


def test_the_processes_that_are_advised_take_no_longer_than_training(advised: Advised) -> None:
    (found,) = advised(CLUSTER, "stages.evaluate.samples=100_000_000_000")["slow-inference"]
    assert found["stage"] == "evaluate" and "launch.processes: " in found["message"]
    numbers = found["numbers"]
    assert numbers["seconds"] * numbers["gpus"] / numbers["processes"] <= numbers["training_seconds"]


def test_the_published_run_samples_within_days() -> None:
    """By a replica on each GPU: 320 completions are in flight on a GH200. Their products take longer than
    reading the weights, and their keys and values are read for each token: the 3.8 million completions of 768
    tokens of the standard set take 41 hours on one GPU, and a quarter of it on a node of four."""
    alone = "stages.preferences-standard.launch.parallel={tp: 1}"
    found: dict[str, Any] = parts(published("apertus-8b", alone), "preferences-standard")["completions"]
    matrices = 32 * 4096 * (2 * 4096 + 2 * 1024 + 2 * 21_504) + 131_072 * 4096
    cached = 320 * (256 + 384) * 2 * 2 * 32 * 1024
    step = 320 * 2 * matrices / (720e12 * clock(560)) + cached / (4.0e12 * 2903 / 3350)
    prefill = 380_499 * (256 * 2 * (matrices - 131_072 * 4096) + 256**2 * 4 * 32 * 4096 + 2 * 131_072 * 4096)
    expected = 3_804_990 / 320 * 767 * step + prefill / (0.363 * 989.5e12)
    assert found["gpus"] == 4 and found["time_source"] == "roofline"
    assert 4 * found["seconds"] == pytest.approx(expected) == pytest.approx(40.5 * 3600, rel=0.01)
