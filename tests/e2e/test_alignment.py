"""The smoke recipe and everything behind it, to an aligned chat model, as a user runs it."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flows.planning.plan import Plan, make
from infra.store import Artifact, Store
from specs.recipe import load
from specs.stages.corpus import CorpusStage
from specs.stages.evaluate import EvaluatePart
from tests.e2e.conftest import ROOT, Run

CHAT = "specs/recipes/smoke-chat.yaml"


@pytest.fixture(scope="module")
def aligned(finished: Path, home: Path, api: str) -> Path:
    """A store in which the whole recipe ran without an interruption, on top of the smoke recipe's
    artifacts."""
    store = home / "aligned"
    shutil.copytree(finished, store)
    run = Run(home, "run", CHAT, "--store", str(store), api=api)
    assert run.wait(400) == 0, run.text
    assert run.no_process_is_left(10)
    return store


def plan_of(store: Path, *overrides: str) -> Plan:
    return make(load(ROOT / CHAT, overrides), Store.open(str(store)))


def artifact(plan: Plan, name: str) -> Artifact:
    node = plan.graph.nodes[name]
    return Artifact(plan.store, node.path, node.end_step)


def rows(plan: Plan, name: str) -> list[dict[str, Any]]:
    return [row for row in artifact(plan, name).history() if "loss" in row]


def test_every_kind_of_stage_finishes_and_nothing_is_left_to_run(aligned: Path, home: Path) -> None:
    plan = plan_of(aligned)
    assert plan.pending == []
    assert {node.kind for node in plan.graph.nodes.values()} == {
        *(
            "tokenizer",
            "corpus",
            "mixture",
            "pretrain",
            "cooldown",
            "long_context",
            "conversations",
            "sft",
            "prompts",
            "completions",
        ),
        *(
            "rewards",
            "pairs",
            "log_probabilities",
            "qrpo",
            "dpo",
            "merge",
            "evaluate",
            "evaluate_reward",
            "continuations",
            "export",
        ),
    }
    run = Run(home, "run", CHAT, "--store", str(aligned))
    assert run.wait(60) == 0, run.text
    assert "are finished; nothing to run." in run.text


def test_evaluations_measure_the_metrics_that_gates_are_checked_against(aligned: Path) -> None:
    plan = plan_of(aligned)
    corpus = plan.pipeline.stages["corpus"]
    assert isinstance(corpus, CorpusStage)
    repeats = corpus.sources["reference"].repeats
    assert repeats is not None
    parts = {
        node.name: (node, node.part)
        for node in plan.graph.nodes.values()
        if isinstance(node.part, EvaluatePart)
    }
    assert {*parts} == {"evaluate", "evaluate-sft", "evaluate-aligned"}
    for name, (node, part) in parts.items():
        other = parts[read.node][1] if (read := node.inputs.get("against")) and read.node else None
        planned = {*part.metrics(node.inputs, repeats.buckets, other.source_names if other else [])}
        measured = {*artifact(plan, name).manifest.metrics}
        assert measured <= planned
        assert {metric for metric in planned - measured if not metric.startswith("loss/position/")} == set()


def test_the_best_checkpoint_of_fine_tuning_is_what_alignment_starts_from(aligned: Path) -> None:
    plan = plan_of(aligned)
    tuned = artifact(plan, "sft")
    losses = {
        step: loss
        for step in tuned.checkpoint_steps()
        if (loss := tuned.checkpoint(step).validation_loss("val_loss")) is not None
    }
    best = min(losses, key=lambda step: losses[step])
    assert {plan.graph.nodes[name].inputs["parent"].step for name in ("align-qrpo", "align-dpo")} == {best}
    assert plan.graph.nodes["preferences/log_probabilities"].inputs["checkpoint"].step == best


def test_the_first_step_of_alignment_has_log_ratios_of_exactly_zero(aligned: Path) -> None:
    plan = plan_of(aligned)
    first, preferred = rows(plan, "align-qrpo")[0], rows(plan, "align-dpo")[0]
    for row in (first, preferred):
        assert (row["log_ratio"], row["log_ratio_chosen"], row["log_ratio_rejected"]) == (0.0, 0.0, 0.0)
    assert preferred["loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert first["residual"] == pytest.approx(first["target"], abs=1e-6)
    assert rows(plan, "align-qrpo")[-1]["log_ratio"] != 0.0


def test_quantiles_are_those_of_the_stored_rewards(aligned: Path) -> None:
    """The arrays that are trained on, recomputed from what people can read."""
    plan = plan_of(aligned)
    pairs = artifact(plan, "preferences/pairs")
    rewards = {row["id"]: row for row in lines(artifact(plan, "preferences/rewards"))}
    stored = np.load(pairs.local("rewards.npy"), allow_pickle=False)
    read = [json.loads(line) for line in pairs.bytes("pairs.jsonl").splitlines()]
    assert len(stored) == 2 * len(read) > 0
    for index, pair in enumerate(read):
        sampled = rewards[pair["id"]]["sampled"]
        for side, value in zip(("chosen", "rejected"), stored[2 * index : 2 * index + 2], strict=True):
            assert value == np.float32(sum(other <= pair[side]["reward"] for other in sampled) / len(sampled))
        assert pair["chosen"]["reward"] > pair["rejected"]["reward"]


def test_a_judge_scores_by_its_constitution_and_its_answers_are_kept(aligned: Path) -> None:
    plan = plan_of(aligned)
    rewards = artifact(plan, "judged/rewards")
    assert "4. It ends when all is said." in rewards.bytes("constitution.txt").decode()
    for row in lines(rewards):
        scores = {
            about[0]: sum(k * p for k, p in enumerate(answer["probabilities"], 1))
            / sum(answer["probabilities"])
            for answer in row["answers"]
            if len(about := answer["about"]) == 1
        }
        # a comparison has given the scores of the best two anew
        assert sorted(row["sampled"]) == pytest.approx(sorted(scores.values()))
    measured = artifact(plan, "evaluate-judge").manifest.metrics
    assert measured["pairs"] + measured.get("too_long", 0) == 8
    assert 0 < measured["outside"] < 1 and "order_bias/high" in measured


def lines(found: Artifact) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for name in found.manifest.facts["shards"]
        for line in found.bytes(f"{name}.jsonl").splitlines()
    ]


def test_the_average_of_two_variants_is_the_mean_of_their_weights(aligned: Path) -> None:
    from apertus_model import device  # before torchtitan  # noqa: F401
    from apertus_model.trainer.checkpoint_reader import CheckpointReader

    plan = plan_of(aligned)
    weights = []
    for name in ("align-qrpo", "align-dpo", "merged"):
        found = artifact(plan, name)
        weights.append(read_tensor(CheckpointReader(found.checkpoint(found.checkpoint_steps()[-1]))))
    first, second, mean = (weight.astype(np.float64) for weight in weights)
    assert np.array_equal(mean.astype(np.float32), ((first + second) / 2).astype(np.float32))
    assert not np.array_equal(first, second)


def read_tensor(storage: Any) -> Any:
    import torch
    import torch.distributed.checkpoint as dcp

    size = storage.read_metadata().state_dict_metadata["lm_head.weight"].size
    state = {"lm_head.weight": torch.empty(size)}
    dcp.load(state, storage_reader=storage, no_dist=True)
    return state["lm_head.weight"].numpy()


def test_the_exported_model_is_a_chat_model_with_a_card_of_its_making(aligned: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    exported = artifact(plan_of(aligned), "aligned-model")
    folder = str(Path(exported.store.full(exported.stored_name("config.json"))).parent)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    talk = [{"role": "user", "content": "What does json.dumps do?"}]
    ids = tokenizer.apply_chat_template(
        talk, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert tokenizer.decode(ids["input_ids"][0]).endswith(
        "<|user_start|>What does json.dumps do?<|user_end|><|assistant_start|>"
    )
    assert (
        GenerationConfig.from_pretrained(folder).eos_token_id
        == tokenizer.convert_tokens_to_ids("<|assistant_end|>")
        == 68
    )
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.rope_parameters["rope_theta"] == 2e6
    answer = model.generate(**ids, max_new_tokens=4, do_sample=False)
    assert ids["input_ids"].shape[1] < answer.shape[1] <= ids["input_ids"].shape[1] + 4
    card = (Path(folder) / "README.md").read_text()
    for line in (
        "preference alignment (QRPO)",
        "chat/questions",
        "PSF-2.0",
        "BSD-3-Clause",
        "kl/against",
        "grounded-answer",
    ):
        assert line in card


def test_evaluation_compares_the_models_before_and_after(aligned: Path) -> None:
    metrics = artifact(plan_of(aligned), "evaluate-aligned").manifest.metrics
    table = artifact(plan_of(aligned), "evaluate-aligned").json("rewards.json")["rows"]
    own, other = (np.array([row[name] for row in table]) for name in ("reward", "against"))
    assert metrics["reward/difference"] == pytest.approx((own - other).mean())
    assert (
        metrics["reward/difference/low"] <= metrics["reward/difference"] <= metrics["reward/difference/high"]
    )
    before = artifact(plan_of(aligned), "evaluate-sft").manifest.metrics
    assert metrics["reward/against"] == pytest.approx(before["reward/mean"])
    assert metrics["forgetting/corpus/code"] == pytest.approx(
        math.log(metrics["perplexity/corpus/code"] / before["perplexity/corpus/code"])
    )
    assert 0 < metrics["kl/against"] < 5
    assert [name for name in before if name.startswith("loss/position/")] == [
        f"loss/position/{edge}" for edge in (0, 192, 288, 96)
    ]


@pytest.mark.slow
def test_killed_in_the_middle_of_tuning_and_of_sampling_it_ends_in_the_same_bits(
    aligned: Path, home: Path, api: str
) -> None:
    store = home / "alignment-interrupted"
    shutil.copytree(aligned, store)
    for kind in ("sft", "completions", "rewards", "pairs", "log_probabilities", "qrpo"):
        shutil.rmtree(store / kind)
    command = ("run", CHAT, "--store", str(store), "--until", "align-qrpo")

    run = Run(home, *command, api=api)
    tuning = artifact(plan_of(store), "sft")
    run.wait_for(lambda: bool(tuning.checkpoint_steps()))
    run.kill_everything()
    assert plan_of(store).steps["sft"].action in ("resume", "reuse")

    run = Run(home, *command, api=api)
    run.wait_for(lambda: (store / "completions").is_dir() and any(store.glob("completions/*/units/*.json")))
    run.kill_everything()
    assert not any(store.glob("rewards/*/manifest.json"))

    run = Run(home, *command, api=api)
    assert run.wait() == 0, run.text
    before, after = plan_of(aligned), plan_of(store)
    for name in ("preferences/completions", "preferences/pairs", "preferences/log_probabilities"):
        files = [
            {file: record.sha256 for file, record in artifact(plan, name).manifest.files.items()}
            for plan in (before, after)
        ]
        assert files[0] == files[1], name
    for name in ("sft", "align-qrpo"):
        losses = [[(row["step"], row["loss"]) for row in rows(plan, name)] for plan in (before, after)]
        assert losses[0] == losses[1], name


def test_a_changed_reward_is_all_that_runs_again(aligned: Path) -> None:
    plan = plan_of(aligned, "stages.preferences.reward=reference-overlap")
    again = {name for name, step in plan.steps.items() if step.action != "reuse"}
    assert {
        "preferences/rewards",
        "preferences/pairs",
        "preferences/log_probabilities",
        "align-qrpo",
        "align-dpo",
    } <= again
    assert (
        not {"preferences/prompts", "preferences/model", "preferences/completions", "sft", "evaluate-sft"}
        & again
    )
    assert (
        "reward.function: 'grounded-answer' -> 'reference-overlap'"
        in plan.steps["preferences/rewards"].reason
    )


def test_the_report_shows_every_stage(aligned: Path, home: Path) -> None:
    output = home / "report.html"
    run = Run(home, "report", CHAT, "--store", str(aligned), "--output", str(output))
    assert run.wait(60) == 0, run.text
    page = output.read_text()
    for name in plan_of(aligned).pipeline.stages:
        assert f">{name}<" in page, name
