from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from apertus_model.data.rows import Rows
from apertus_model.generation import batch_seed
from apertus_model.vllm_client import VllmError
from infra.store import Artifact, Attempt
from specs.errors import StageError
from tests.apertus_model.preference_artifacts import put_model, put_rows

FACTS = {"end_of_turn_id": 68, "pad_id": 10}


def _prompts(bench: Any, *tokens: list[int]) -> Artifact:
    return put_rows(
        bench, "prompts", "p", [{"id": str(i), "tokens": ids} for i, ids in enumerate(tokens)], FACTS
    )


def _run(
    bench: Any,
    model: Artifact,
    prompts: Artifact,
    fingerprint: str = "c",
    *,
    units: int = 64,
    launch: Any = None,
    **sampling: Any,
) -> Artifact:
    spec = {"sampling": {"n": 2, "max_new_tokens": 6, "batch_size": 2} | sampling, "prompts_per_unit": units}
    return bench.run("completions", fingerprint, spec, {"model": model, "prompts": prompts}, launch=launch)


PROMPTS = [[1, 61, 300, 67], [1, 400, 401, 402, 403, 404, 67], [1, 67], [1, 350, 351, 67], [1, 333, 67]]


def _greedy(folder: Artifact, prompt: list[int], count: int) -> list[int]:
    """Without cache, padding or batch: the most probable next token, again and again."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder.local("config.json").parent, dtype=torch.float32)
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_greedy_completions_are_the_most_probable_tokens_for_prompts_of_any_length(
    bench: Any, tokenizer: Artifact
) -> None:
    model = put_model(bench, tokenizer)
    artifact = _run(bench, model, _prompts(bench, *PROMPTS), temperature=0)
    for row, prompt in zip(Rows(artifact), PROMPTS, strict=True):
        expected = _greedy(model, prompt, 6)
        assert 68 not in expected
        assert [one["tokens"] for one in row["completions"]] == [expected] * 2
        assert not row["completions"][0]["finished"]
    metrics = dict(artifact.manifest.metrics)
    assert metrics.pop("tokens_per_second") > 0
    assert metrics == {
        **{"prompts": 5, "completions": 10, "tokens": 60, "finished": 0},
        **{"mean_tokens": 6.0, "finished_share": 0.0},
    }


def test_a_tiny_top_p_leaves_the_most_probable_token(bench: Any, tokenizer: Artifact) -> None:
    model = put_model(bench, tokenizer)
    [row] = Rows(_run(bench, model, _prompts(bench, PROMPTS[0]), top_p=1e-6))
    assert [one["tokens"] for one in row["completions"]] == [_greedy(model, PROMPTS[0], 6)] * 2


def test_tokens_are_drawn_with_the_probabilities_of_the_model(bench: Any, tokenizer: Artifact) -> None:
    model = put_model(bench, tokenizer, scale=0.5)
    draws = 4000
    [row] = Rows(_run(bench, model, _prompts(bench, PROMPTS[0]), n=draws, max_new_tokens=1, temperature=0.7))
    from transformers import AutoModelForCausalLM

    opened = AutoModelForCausalLM.from_pretrained(model.local("config.json").parent, dtype=torch.float64)
    with torch.no_grad():
        probabilities = torch.softmax(opened(torch.tensor([PROMPTS[0]])).logits[0, -1] / 0.7, -1)
    counts = torch.bincount(
        torch.tensor([one["tokens"][0] for one in row["completions"]]), minlength=len(probabilities)
    )
    likely = probabilities > 5 / draws
    deviations = (counts - draws * probabilities)[likely] / (draws * probabilities * (1 - probabilities))[
        likely
    ].sqrt()
    assert likely.sum() > 20
    assert 0.6 < deviations.std() < 1.6  # 5.4 without the temperature
    assert deviations.abs().max() < 4.5


def test_a_completion_ends_with_the_turn_and_generation_with_the_last_completion(
    bench: Any, tokenizer: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import ApertusForCausalLM

    calls = []
    forward = ApertusForCausalLM.forward
    monkeypatch.setattr(
        ApertusForCausalLM, "forward", lambda self, *a, **k: (calls.append(1), forward(self, *a, **k))[1]
    )
    artifact = _run(
        bench, put_model(bench, tokenizer, favourite=68), _prompts(bench, *PROMPTS[:2]), max_new_tokens=50
    )
    expected = {"text": "", "tokens": [68], "finished": True}
    assert [row["completions"] for row in Rows(artifact)] == [[expected] * 2] * 2
    assert len(calls) == 1


def test_special_tokens_do_not_enter_the_text(bench: Any, tokenizer: Artifact) -> None:
    [row] = Rows(
        _run(bench, put_model(bench, tokenizer, favourite=67), _prompts(bench, PROMPTS[0]), max_new_tokens=3)
    )
    assert row["completions"][0] == {"text": "", "tokens": [67] * 3, "finished": False}


def test_neither_units_nor_a_restart_change_a_completion(bench: Any, tokenizer: Artifact) -> None:
    class Killed(Attempt):
        def commit_unit(self, key: str, **more: Any) -> None:
            if key.startswith("completions-00000002"):
                raise KeyboardInterrupt
            super().commit_unit(key, **more)

    model, prompts = put_model(bench, tokenizer), _prompts(bench, *PROMPTS)
    whole = _run(bench, model, prompts, "whole").bytes("completions-00000.jsonl")
    assert _run(bench, model, prompts, "parts", units=3).bytes("completions-00000.jsonl") == whole
    spec = {"sampling": {"n": 2, "max_new_tokens": 6, "batch_size": 2}, "prompts_per_unit": 1}
    inputs = {"model": model, "prompts": prompts}
    with pytest.raises(KeyboardInterrupt):
        bench.run("completions", "killed", spec, inputs, attempt_class=Killed)
    assert (
        bench.run("completions", "killed", spec, inputs, attempt="second").bytes("completions-00000.jsonl")
        == whole
    )
    assert _run(bench, model, prompts, "seed", seed=1).bytes("completions-00000.jsonl") != whole


def test_completions_of_a_prompt_differ_and_so_do_equal_prompts_of_different_batches(
    bench: Any, tokenizer: Artifact
) -> None:
    rows = Rows(_run(bench, put_model(bench, tokenizer), _prompts(bench, *[PROMPTS[0]] * 4)))
    assert len({tuple(one["tokens"]) for row in rows for one in row["completions"]}) == 8


VLLM = """\
import json, os, sys
from types import SimpleNamespace
print("vLLM says a lot")
SamplingParams = dict
class LLM:
    def __init__(self, **stated):
        stated["ours"] = [name for name in os.environ if name in ("RANK", "MASTER_PORT")]
        json.dump(stated, open(os.environ["HERE"] + "/engine.json", "w"))
    def generate(self, prompts, parameters, use_tqdm):
        with open(os.environ["HERE"] + "/parameters.jsonl", "a") as file:
            print(json.dumps(parameters), file=file)
        if any(300 in prompt["prompt_token_ids"] for prompt in prompts) and os.environ.get("FAIL"):
            sys.exit(7)
        echo = lambda prompt, n: SimpleNamespace(token_ids=(*prompt["prompt_token_ids"], 68, 5)[-2 - n:])
        return [
            SimpleNamespace(outputs=[echo(prompt, k) for k in range(asked["n"])])
            for prompt, asked in zip(prompts, parameters, strict=True)
        ]
"""


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment with a vLLM that completes with the end of the prompt, and writes down what it is
    asked."""
    (tmp_path / "vllm.py").write_text(VLLM)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nHERE={tmp_path} PYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("APERTUS_VLLM_PYTHON", str(python))
    return tmp_path


def test_vllm_in_its_own_environment_has_the_gpus_of_the_launch_and_a_seed_for_every_prompt(
    bench: Any, tokenizer: Artifact, vllm: Path
) -> None:
    model, prompts = put_model(bench, tokenizer), _prompts(bench, *PROMPTS[:3])
    artifact = _run(bench, model, prompts, engine="vllm", launch={"processes": 8, "parallel": {"tp": 4}})
    rows = [[one["tokens"] for one in row["completions"]] for row in Rows(artifact)]
    assert rows == [[[68], [67, 68]]] * 3  # up to the end of the turn
    stated = json.loads((vllm / "engine.json").read_text())
    assert (stated["tensor_parallel_size"], stated["dtype"], stated["trust_remote_code"], stated["ours"]) == (
        4,
        "bfloat16",
        False,
        [],
    )
    asked = [one for line in (vllm / "parameters.jsonl").read_text().splitlines() for one in json.loads(line)]
    assert [one.pop("seed") for one in asked] == [batch_seed(28, index) for index in range(3)]
    assert asked == [{"n": 2, "temperature": 1.0, "top_p": 1.0, "max_tokens": 6, "stop_token_ids": [68],
    "ignore_eos": True,
                      "detokenize": False}] * 3  # fmt: skip


def test_vllm_that_ends_in_the_middle_is_a_failure_that_may_be_tried_again(
    bench: Any, tokenizer: Artifact, vllm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIL", "1")
    with pytest.raises(RuntimeError, match="vLLM ended with exit code 7") as raised:
        _run(bench, put_model(bench, tokenizer), _prompts(bench, *PROMPTS), engine="vllm")
    assert not isinstance(raised.value, StageError)


@pytest.mark.parametrize("python", ["/nonexistent/python", ""])
def test_vllm_that_is_not_installed_is_a_message(
    bench: Any, tokenizer: Artifact, python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APERTUS_VLLM_PYTHON", python)
    with pytest.raises(
        VllmError,
        match=r"(names /nonexistent/python|cannot import vLLM).*pip install vllm.*engine: transformers",
    ):
        _run(bench, put_model(bench, tokenizer), _prompts(bench, *PROMPTS), engine="vllm")


def test_vllm_has_all_prompts_of_a_unit_in_flight_and_completes_greedily_once(
    bench: Any, tokenizer: Artifact, vllm: Path
) -> None:
    model, prompts = put_model(bench, tokenizer), _prompts(bench, *PROMPTS)
    artifact = _run(bench, model, prompts, engine="vllm", n=3, temperature=0, batch_size=1, units=4)
    calls = [json.loads(line) for line in (vllm / "parameters.jsonl").read_text().splitlines()]
    assert [len(call) for call in calls] == [4, 1]
    assert {one["n"] for call in calls for one in call} == {1}
    for row in Rows(artifact):
        assert len(row["completions"]) % 3 == 0 and row["completions"][0] == row["completions"][-1]
