"""The process that answers for vLLM, line by line."""

from __future__ import annotations

import io
import json
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from apertus_model.vllm_process import main
from tests.snapshots.model import with_bos, write_model


def answered(*lines: Any) -> list[Any]:
    answers = io.StringIO()
    main(io.StringIO("".join(json.dumps(line) + "\n" for line in lines)), answers)
    return [json.loads(line) for line in answers.getvalue().splitlines()]


class Parameters(SimpleNamespace):
    logprob_token_ids = None


class Model:
    """Completes a prompt with its sum and the seed, as often as `n` says. The logarithm of the probability of
    token t after a prompt is its sum - t."""

    asked: ClassVar[list[int]] = []  # how many tokens' probabilities, for each call

    def __init__(self, **engine: Any) -> None:
        assert engine == {"model": "/folder", "seed": 1}

    def generate(self, prompts: list[Any], parameters: Any, use_tqdm: bool) -> list[Any]:
        assert not use_tqdm
        sums = [sum(prompt["prompt_token_ids"]) for prompt in prompts]
        if isinstance(parameters, list):
            return [
                SimpleNamespace(outputs=[SimpleNamespace(token_ids=(total, own.seed))] * own.n)
                for total, own in zip(sums, parameters, strict=True)
            ]
        tokens = parameters.logprob_token_ids
        assert parameters.max_tokens == 1 and len(tokens) <= 128
        Model.asked.append(len(tokens))
        return [
            SimpleNamespace(
                outputs=[
                    SimpleNamespace(
                        logprobs=[{token: SimpleNamespace(logprob=float(total - token)) for token in tokens}]
                    )
                ]
            )
            for total in sums
        ]


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    module = SimpleNamespace(LLM=Model, SamplingParams=Parameters, __version__="0.9")
    monkeypatch.setitem(sys.modules, "vllm", module)  # type: ignore[arg-type]  # a module
    return module


ENGINE = {"model": "/folder", "seed": 1}


def test_every_prompt_has_its_seed_and_the_ids_of_its_completions(vllm: SimpleNamespace) -> None:
    found = answered(
        ENGINE,
        {"prompts": [[1, 2], [3]], "sampling": [{"n": 2, "seed": 7}, {"n": 2, "seed": 8}]},
        {"prompts": [[4]], "sampling": [{"n": 1, "seed": 9}]},
    )
    assert found == [{}, [[[3, 7], [3, 7]], [[3, 8], [3, 8]]], [[[4, 9]]]]


def test_probabilities_of_chosen_tokens_keep_their_order_beyond_vllms_limit(
    vllm: SimpleNamespace,
) -> None:
    tokens = [*range(200, 0, -1)]
    Model.asked.clear()
    _, found = answered(ENGINE, {"prompts": [[1000], [2000, 1]], "tokens": tokens})
    assert found == [[float(total - token) for token in tokens] for total in (1000, 2001)]
    assert Model.asked == [128, 72]


def test_a_vllm_that_does_not_tell_probabilities_of_chosen_tokens_is_an_answer(vllm: SimpleNamespace) -> None:
    vllm.SamplingParams = dict
    _, found = answered(ENGINE, {"prompts": [[1]], "tokens": [1]})
    assert found == {"error": "vLLM 0.9 does not tell the probabilities of chosen tokens"}


def test_a_missing_vllm_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # type: ignore[arg-type]  # not importable
    (found,) = answered({}, {"prompts": [[1]], "sampling": [{}]})
    assert "vllm" in found["error"]


class HarnessModel:
    """The harness's model for vLLM: says for each request its type, its arguments and its number."""

    def __init__(self, **engine: Any) -> None:
        assert engine == {"pretrained": "/folder"}

    def generate_until(self, requests: list[Any]) -> list[Any]:
        return [[one.request_type, *one.args, one.idx] for one in requests]


@pytest.mark.parametrize("harness", ["0.4.13", "0.4.9"])
def test_requests_of_tasks_are_answered_by_the_same_harness(
    harness: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = lambda kind, _, args, idx: SimpleNamespace(request_type=kind, args=args, idx=idx)  # noqa: E731
    theirs = SimpleNamespace(VLLM=HarnessModel, get_rolling_token_windows=None)
    for name, module in {
        "lm_eval": {},
        "lm_eval.api": {},
        "lm_eval.api.instance": {"Instance": instance},
        "lm_eval.models": {"vllm_causallms": theirs},
    }.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**module))
    monkeypatch.setattr("apertus_model.vllm_process.version", {"lm_eval": "0.4.13"}.__getitem__)
    asked = {"kind": "generate_until", "requests": [["a", {"until": ["."]}], ["b", {}]]}
    found = answered({"lm_eval": harness, "pretrained": "/folder"}, asked)
    if harness == "0.4.13":
        told = [["generate_until", "a", {"until": ["."]}, 0], ["generate_until", "b", {}, 1]]
        assert found == [{}, told]
    else:
        assert found == [{"error": "lm_eval 0.4.13 is there, and 0.4.9 here"}]


def test_a_whole_text_is_scored_by_vllm_after_one_bos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The harness's own code for vLLM makes the requests, of a tokenizer that begins texts with a BOS."""
    pytest.importorskip("lm_eval", reason="the extra `harness` is not installed")
    from transformers import AutoTokenizer

    fakes = {
        "vllm": {"LLM": None, "SamplingParams": None, "TokensPrompt": None},
        "vllm.lora": {},
        "vllm.lora.request": {"LoRARequest": None},
        "vllm.tokenizers": {"get_tokenizer": None},
    }
    for name, content in fakes.items():
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**content))  # type: ignore[arg-type]
    installed = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.5" if name == "vllm" else installed(name))
    from lm_eval.models import vllm_causallms

    folder = with_bos(write_model(tmp_path / "model", []))
    asked: list[tuple[list[int], list[int]]] = []

    class Recorded(vllm_causallms.VLLM):  # type: ignore[misc]
        def __init__(self) -> None:
            vllm_causallms.TemplateLM.__init__(self)
            self.tokenizer = AutoTokenizer.from_pretrained(folder)
            self.custom_prefix_token_id = self.add_bos_token = None
            self.batch_size, self._max_length = "auto", 18

        def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False) -> Any:
            asked.extend((context, continuation) for _, context, continuation in requests)
            return [(0.0, True)] * len(requests)

    monkeypatch.setattr(vllm_causallms, "VLLM", Recorded)
    windows = vllm_causallms.get_rolling_token_windows
    monkeypatch.setattr(vllm_causallms, "get_rolling_token_windows", windows)  # and put back
    text = "which number is it, and how many words"
    ids = Recorded().tokenizer(text)["input_ids"]
    assert ids[0] == 0 and 0 not in ids[1:] and len(ids) > 33
    harness = metadata.version("lm_eval")
    (ready, _) = answered({"lm_eval": harness}, {"kind": "loglikelihood_rolling", "requests": [[text]]})
    assert ready == {} and asked[0][0] == [0]
    assert [token for _, continuation in asked for token in continuation] == ids[1:]
