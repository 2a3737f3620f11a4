from __future__ import annotations

from typing import Any

import pytest
import torch
from preference_artifacts import put_model, put_rows

from apertus_model.data.rows import Rows
from apertus_model.generation import GenerationError
from infra.store import Artifact, Attempt

FACTS = {"end_of_turn_id": 68, "pad_id": 10}


def _prompts(bench: Any, *tokens: list[int]) -> Artifact:
    return put_rows(bench, "prompts", "p", [{"id": str(i), "tokens": ids} for i, ids in enumerate(tokens)], FACTS)


def _run(bench: Any, model: Artifact, prompts: Artifact, fingerprint: str = "c", *, units: int = 64, **sampling: Any) -> Artifact:
    spec = {"sampling": {"n": 2, "max_new_tokens": 6, "batch_size": 2} | sampling, "prompts_per_unit": units}
    return bench.run("completions", fingerprint, spec, {"model": model, "prompts": prompts})


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


def test_greedy_completions_are_the_most_probable_tokens_for_prompts_of_any_length(bench: Any, tokenizer: Artifact) -> None:
    model = put_model(bench, tokenizer)
    artifact = _run(bench, model, _prompts(bench, *PROMPTS), temperature=0)
    for row, prompt in zip(Rows(artifact), PROMPTS, strict=True):
        expected = _greedy(model, prompt, 6)
        assert 68 not in expected
        assert [one["tokens"] for one in row["completions"]] == [expected] * 2
        assert not row["completions"][0]["finished"]
    assert artifact.manifest["metrics"] == {
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
    counts = torch.bincount(torch.tensor([one["tokens"][0] for one in row["completions"]]), minlength=len(probabilities))
    likely = probabilities > 5 / draws
    deviations = (counts - draws * probabilities)[likely] / (draws * probabilities * (1 - probabilities))[likely].sqrt()
    assert likely.sum() > 20
    assert 0.6 < deviations.std() < 1.6  # 5.4 without the temperature
    assert deviations.abs().max() < 4.5


def test_a_completion_ends_with_the_turn_and_generation_with_the_last_completion(
    bench: Any, tokenizer: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import ApertusForCausalLM

    calls = []
    forward = ApertusForCausalLM.forward
    monkeypatch.setattr(ApertusForCausalLM, "forward", lambda self, *a, **k: (calls.append(1), forward(self, *a, **k))[1])
    artifact = _run(bench, put_model(bench, tokenizer, favourite=68), _prompts(bench, *PROMPTS[:2]), max_new_tokens=50)
    expected = {"text": "", "tokens": [68], "finished": True}
    assert [row["completions"] for row in Rows(artifact)] == [[expected] * 2] * 2
    assert len(calls) == 1


def test_special_tokens_do_not_enter_the_text(bench: Any, tokenizer: Artifact) -> None:
    [row] = Rows(_run(bench, put_model(bench, tokenizer, favourite=67), _prompts(bench, PROMPTS[0]), max_new_tokens=3))
    assert row["completions"][0] == {"text": "", "tokens": [67] * 3, "finished": False}


def test_neither_units_nor_a_restart_change_a_completion(bench: Any, tokenizer: Artifact) -> None:
    class Killed(Attempt):
        def commit_unit(self, key: str, **more: Any) -> dict[str, Any]:
            if key.startswith("completions-00000002"):
                raise KeyboardInterrupt
            return super().commit_unit(key, **more)

    model, prompts = put_model(bench, tokenizer), _prompts(bench, *PROMPTS)
    whole = _run(bench, model, prompts, "whole").bytes("completions-00000.jsonl")
    assert _run(bench, model, prompts, "parts", units=3).bytes("completions-00000.jsonl") == whole
    spec = {"sampling": {"n": 2, "max_new_tokens": 6, "batch_size": 2}, "prompts_per_unit": 1}
    inputs = {"model": model, "prompts": prompts}
    with pytest.raises(KeyboardInterrupt):
        bench.run("completions", "killed", spec, inputs, attempt_class=Killed)
    assert bench.run("completions", "killed", spec, inputs, attempt="second").bytes("completions-00000.jsonl") == whole
    assert _run(bench, model, prompts, "seed", seed=1).bytes("completions-00000.jsonl") != whole


def test_completions_of_a_prompt_differ_and_so_do_equal_prompts_of_different_batches(bench: Any, tokenizer: Artifact) -> None:
    rows = Rows(_run(bench, put_model(bench, tokenizer), _prompts(bench, *[PROMPTS[0]] * 4)))
    assert len({tuple(one["tokens"]) for row in rows for one in row["completions"]}) == 8


def test_vllm_that_is_not_installed_is_a_message(bench: Any, tokenizer: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "vllm", None)
    with pytest.raises(GenerationError, match=r"apertus\[vllm\].*engine: transformers"):
        _run(bench, put_model(bench, tokenizer), _prompts(bench, *PROMPTS), engine="vllm")
