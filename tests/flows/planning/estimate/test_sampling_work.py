"""What sampling, and scoring of completions, asks of its models, counted by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.planning.estimate.inference import work_of
from flows.planning.estimate.work import Known
from flows.planning.plan import Plan
from flows.planning.run_records import Records
from tools.published import plan_of

Chat = Callable[..., Plan]
# Of the tiny model: 2 layers of 32 x (2 x 32 + 2 x 16 + 2 x 64) elements, queries 32 wide, 512 words.
LAYERS, SCORES, OUTPUT = 2 * 2 * 7168, 2 * 4 * 32, 2 * 512 * 32
DECLARED = "sources.questions.declared={documents: 40}"  # of which a fifth is held out
EXPECTED = tuple(
    f"stages.preferences.completions.{name}={value}"
    for name, value in {"expected_tokens": 10, "expected_prompt_tokens": 20}.items()
)


def parts(plan: Plan, stage: str = "preferences") -> dict[str, dict[str, Any]]:
    found = plan.to_json()["estimates"]["inference"][stage]["parts"]
    return {part["name"].removeprefix(f"{stage}/"): part for part in found}


def numbers(part: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(
        part[name] for name in ("requests", "read_tokens", "sampled_tokens", "flops", "tokens_source")
    )


def bytes_of_a_parameter(plan: Plan) -> int:
    known = Known(plan.graph, plan.store, Records(plan.store, plan.pipeline.name))
    work = work_of(known, plan.graph.nodes["preferences/rewards"])
    assert work is not None
    return work.width


def test_counts_of_preference_data_are_those_made_by_hand(chat: Chat) -> None:
    """32 prompts of 20 tokens, four completions of 10 each; the pairs, 64 sequences of 30 tokens, fill 15
    rows of 128."""
    plan = chat(DECLARED, *EXPECTED)
    found = parts(plan)
    assert list(found) == ["completions", "log_probabilities"]  # the reward is a function
    read = 20 * LAYERS + 20 * 20 * SCORES + OUTPUT
    steps = 9 * (LAYERS + OUTPUT) + sum(range(21, 30)) * SCORES
    assert numbers(found["completions"]) == (128, 2560, 1280, 128 * (read + steps), "declared")
    assert numbers(found["log_probabilities"]) == (
        64, 1920, 0, 1920 * (LAYERS + 128 * SCORES + OUTPUT), "declared",
    )  # fmt: skip
    stage = plan.to_json()["estimates"]["inference"]["preferences"]
    assert stage["flops"] == sum(part["flops"] for part in found.values())
    assert (stage["requests"], stage["seconds"], stage["not_counted"]) == (192, None, [])
    steps = {step["name"]: step["flops"] for one in plan.to_json()["stages"] for step in one["parts"]}
    assert steps["preferences/completions"] == found["completions"]["flops"]


@pytest.mark.parametrize(("choice", "prompts"), [("share=0.5", 16), ("count=10", 8), ("count=100", 32)])
def test_prompts_of_a_part_of_a_source_are_counted(chat: Chat, choice: str, prompts: int) -> None:
    name, value = choice.split("=")
    plan = chat(DECLARED, *EXPECTED, f"stages.chat.sources.questions={{holdout: 0.2, {name}: {value}}}")
    assert parts(plan)["completions"]["requests"] == 4 * prompts


def test_a_prompt_is_read_once_by_vllm_and_greedy_completions_are_made_once_by_transformers(
    chat: Chat,
) -> None:
    def requests(*changes: str) -> tuple[int, int]:
        changed = (f"stages.preferences.completions.{change}" for change in changes)
        completions = parts(chat(DECLARED, *EXPECTED, *changed))["completions"]
        return completions["requests"], completions["read_tokens"]

    assert requests() == (128, 128 * 20)
    assert requests("engine=vllm") == (128, 32 * 20)
    assert requests("temperature=0") == (32, 32 * 20)


def test_lengths_that_nothing_states_are_bounds(chat: Chat) -> None:
    """max_tokens is 64, of which max_new_tokens takes 16; a pair of them fills a row."""
    found = parts(chat(DECLARED))
    assert numbers(found["completions"])[:3] == (128, 128 * 48, 128 * 16)
    assert numbers(found["log_probabilities"])[:2] == (64, 64 * 64)
    assert {part["tokens_source"] for part in found.values()} == {"at most"}


def test_a_reward_model_is_counted_by_its_files_or_as_declared(chat: Chat, tmp_path: Path) -> None:
    folder = tmp_path / "reward"
    model = f"stages.preferences.reward={{model: {folder}, parameters: 1000}}"
    offline = "stages.preferences.offline=false"
    absent = f"assumed_inputs={{files: [{folder}]}}"
    declared = parts(chat(DECLARED, *EXPECTED, model, offline, absent))["rewards"]
    assert numbers(declared) == (128, 128 * 30, 0, 2 * 1000 * 128 * 30, "declared")
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"0" * 8000)
    (folder / "config.json").write_text(json.dumps({"torch_dtype": "float32"}))
    found = parts(chat(DECLARED, *EXPECTED, model, offline))["rewards"]
    assert found["flops"] == 2 * 2000 * 128 * 30
    assert parts(chat(DECLARED, *EXPECTED, model))["rewards"]["not_counted"] == "offline completions"


def test_a_judge_reads_completions_and_two_for_each_comparison(chat: Chat, tmp_path: Path) -> None:
    """128 completions; of the best three of 32 prompts six ordered pairs, which are 192 questions."""
    (tmp_path / "c.md").write_text("1. Be kind.")
    judge = f"{{from: sft, constitution: {tmp_path}/c.md, pairwise: {{best: 3}}}}"
    reward = f"stages.preferences.reward={{judge: {judge}, max_tokens: 128}}"
    plan = chat(DECLARED, *EXPECTED, reward, "stages.preferences.offline=false")
    read, parameters = (128 + 2 * 192) * 30, plan.graph.trajectories["sft"].model.parameters
    assert numbers(parts(plan)["rewards"]) == (128 + 192, read, 0, 2 * parameters * read, "declared")
    server = f"{{url: 'http://h/v1', model: m, api: chat}}, revision: '1', constitution: {tmp_path}/c.md"
    by_vllm = chat(DECLARED, *EXPECTED, reward, "stages.preferences.reward.judge.engine=vllm")
    assert [bytes_of_a_parameter(one) for one in (plan, by_vllm)] == [4, 2]
    served = chat(DECLARED, *EXPECTED, f"stages.preferences.reward={{judge: {{server: {server}}}}}")
    assert parts(served)["rewards"]["not_counted"] == "the model of a server"


def test_sampling_by_another_architecture_is_counted_by_its_dimensions(chat: Chat) -> None:
    """Those of the tiny model, so the counts are the same."""
    by = "stages.preferences.sampler=hf:a/b"
    dims = "dim: 32, n_layers: 2, n_heads: 2, n_kv_heads: 1, head_dim: 16, ffn_dim: 64, vocab_size: 512"

    def found(more: str) -> dict[str, Any]:
        assumed = f"assumed_inputs={{models: {{'hf:a/b': {{context: 256, chat: true{more}}}}}}}"
        return parts(chat(DECLARED, *EXPECTED, by, assumed))["completions"]

    own = parts(chat(DECLARED, *EXPECTED))["completions"]
    assert numbers(found(f", shape: {{{dims}}}")) == numbers(own)
    gated = found(f", shape: {{{dims}, activation: swiglu}}")  # a third matrix of the feed-forward
    assert gated["flops"] - own["flops"] == 2 * 2 * 32 * 64 * 128 * (20 + 9)
    assert found("")["not_counted"] == "the dimensions of a/b (assumed_inputs.models)"


def test_an_unavailable_judge_is_counted_as_declared(chat: Chat, tmp_path: Path) -> None:
    (tmp_path / "c.md").write_text("1. Be kind.")
    judge = f"{{from: 'hf:a/b', constitution: {tmp_path}/c.md}}"
    dims = "dim: 32, n_layers: 2, n_heads: 2, n_kv_heads: 1, head_dim: 16, ffn_dim: 64, vocab_size: 512"
    assumed = "assumed_inputs={models: {'hf:a/b': {context: 256, chat: true}}}"
    shaped = assumed.replace("true", f"true, shape: {{{dims}}}")
    changes = (DECLARED, *EXPECTED, "stages.preferences.offline=false", assumed)
    stated = f"stages.preferences.reward={{judge: {judge}, max_tokens: 256, parameters: 1000}}"
    assert parts(chat(*changes, stated))["rewards"]["flops"] == 2 * 1000 * 128 * 30
    without = f"stages.preferences.reward={{judge: {judge}, max_tokens: 256}}"
    assert parts(chat(*changes, without))["rewards"]["not_counted"] == "parameters (reward.parameters)"
    own = chat().graph.trajectories["sft"].model.parameters  # of the same dimensions
    assert parts(chat(*changes[:-1], shaped, without))["rewards"]["flops"] == 2 * own * 128 * 30


@pytest.mark.parametrize(
    ("size", "layers", "dim", "queries", "keys", "ffn"),
    [("8b", 32, 4096, 4096, 1024, 21_504), ("70b", 80, 8192, 8192, 1024, 43_008)],
)
def test_the_completions_of_the_published_runs(
    size: str, layers: int, dim: int, queries: int, keys: int, ffn: int
) -> None:
    """Ten completions of 768 tokens after 256 for each of the 453,235 prompts of both sets [P], less one in
    10,000. The reward model reads them and the 11 answers of other models; so does the judge of the second
    set, and two answers for each of the 20 ordered pairs of the best five."""
    plan, whole = plan_of(f"apertus-{size}"), 0
    for name, stated, asked, read, parameters in (
        ("standard", 380_537, 21, 21, 7_504_928_768),
        ("controversial", 72_698, 21 + 20, 21 + 40, 32_800_000_000),
    ):
        prompts = round(stated * 0.9999)
        whole += prompts
        found = parts(plan, f"preferences-{name}")
        check_published(found, prompts, layers, dim, queries, keys, ffn)
        tokens = read * prompts * 1024
        assert numbers(found["rewards"]) == (asked * prompts, tokens, 0, 2 * parameters * tokens, "declared")
    assert whole == 453_190


def check_published(
    found: dict[str, dict[str, Any]], prompts: int, layers: int, dim: int, queries: int, keys: int, ffn: int
) -> None:
    each = 2 * layers * dim * (2 * queries + 2 * keys + 2 * ffn)
    output, scores = 2 * 131_072 * dim, layers * 4 * queries
    read = 256 * each + 256 * 256 * scores + output
    steps = 767 * (each + output) + sum(range(257, 1024)) * scores
    completions = 10 * prompts
    assert numbers(found["completions"]) == (
        completions, prompts * 256, completions * 768, prompts * read + completions * steps, "declared",
    )  # fmt: skip
    rows = -(-prompts * 2 * 1024 // 8192)
    scored = each + 8192 * scores + output
    assert numbers(found["log_probabilities"])[1:4] == (rows * 8192, 0, rows * 8192 * scored)
