"""The process that answers for vLLM, line by line."""

from __future__ import annotations

import io
import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from apertus_model.vllm_process import main


def answered(*lines: Any) -> list[Any]:
    answers = io.StringIO()
    main(io.StringIO("".join(json.dumps(line) + "\n" for line in lines)), answers)
    return [json.loads(line) for line in answers.getvalue().splitlines()]


def test_every_prompt_has_its_seed_and_the_ids_of_its_completions(monkeypatch: pytest.MonkeyPatch) -> None:
    class Model:
        """Completes a prompt with its sum and the seed, as often as `n` says."""

        def __init__(self, **engine: Any) -> None:
            assert engine == {"model": "/folder", "seed": 1}

        def generate(self, prompts: list[Any], parameters: list[Any], use_tqdm: bool) -> list[Any]:
            assert not use_tqdm
            return [
                SimpleNamespace(
                    outputs=[
                        SimpleNamespace(token_ids=(sum(prompt["prompt_token_ids"]), settings["seed"]))
                        for _ in range(settings["n"])
                    ]
                )
                for prompt, settings in zip(prompts, parameters, strict=True)
            ]

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=Model, SamplingParams=dict))  # type: ignore[arg-type]  # a module
    found = answered(
        {"engine": {"model": "/folder", "seed": 1}, "sampling": {"n": 2}},
        {"prompts": [[1, 2], [3]], "seeds": [7, 8]},
        {"prompts": [[4]], "seeds": [9]},
    )
    assert found == [{}, [[[3, 7], [3, 7]], [[3, 8], [3, 8]]], [[[4, 9], [4, 9]]]]


def test_a_missing_vllm_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # type: ignore[arg-type]  # not importable
    (found,) = answered({"engine": {}, "sampling": {}}, {"prompts": [[1]], "seeds": [1]})
    assert "vllm" in found["error"]
