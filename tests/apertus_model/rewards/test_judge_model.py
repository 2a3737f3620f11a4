"""What a judge's model gives, compared with transformers, and servers that give it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from apertus_model.rewards import RewardError
from apertus_model.rewards.judge_model import ChatTokens, ServerJudge, TransformersJudge, VllmJudge
from apertus_model.server_client import ServerFailure
from apertus_model.tokenizer_files import TokenizerError
from apertus_model.vllm_client import VLLM_PYTHON, Vllm
from specs.judge import Judge
from tests.apertus_model.openai_server import Handler, Server, changed, replies, serving
from tests.apertus_model.other_models import other_folder

BEGINNINGS = ("The rules: be kind. The answer: one", "The rules: be kind. The answer: two")
QUESTIONS = ["The rules: be kind. The answer: yes", "The rules: be kind. The answer: no, 7 {times}", "Other"]
DIGITS = tuple("123456789")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return other_folder(tmp_path_factory.mktemp("judge") / "model", "Qwen3ForCausalLM")


def opened(folder: Path, max_tokens: int = 100) -> TransformersJudge:
    return TransformersJudge(folder, "theirs", ChatTokens(folder, "theirs", max_tokens, {}), BEGINNINGS)


def by_hand(folder: Path, question: str) -> torch.Tensor:
    """log p of all tokens after the rendered question, by one pass of transformers without a cache."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    talk = [{"role": "user", "content": question}]
    ids = tokenizer.apply_chat_template(
        talk, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        return torch.log_softmax(model(**ids, use_cache=False).logits[0, -1].double(), dim=-1)


def test_probabilities_are_those_of_the_tokens_that_read_as_the_answer(folder: Path) -> None:
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    ids = [[vocabulary[text] for text in (digit, f"Ġ{digit}") if text in vocabulary] for digit in DIGITS]
    found = opened(folder).ask(QUESTIONS, DIGITS)
    for question, probabilities in zip(QUESTIONS, found, strict=True):
        logs = by_hand(folder, question)
        expected = [sum(math.exp(logs[one]) for one in same) for same in ids]
        assert probabilities == pytest.approx(expected, rel=1e-4)
    assert found[0] != found[1]


def test_a_token_counts_with_spaces_and_in_full_width(folder: Path, tmp_path: Path) -> None:
    """The mass of the three tokens that read as 7, of which each has a known share."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    copied = other_folder(tmp_path / "spaced", "Qwen3ForCausalLM", favourite="7")
    tokenizer: Any = AutoTokenizer.from_pretrained(copied)
    tokenizer.add_tokens([" 7", "７"])
    tokenizer.save_pretrained(copied)
    model: Any = AutoModelForCausalLM.from_pretrained(copied)
    with torch.no_grad():
        for text in (" 7", "７"):
            row = tokenizer.convert_tokens_to_ids(text)
            model.lm_head.weight[row] = model.lm_head.weight[tokenizer.convert_tokens_to_ids("7")]
    model.save_pretrained(copied)
    [[seven, eight]] = opened(copied).ask(["?"], ("7", "8"))
    assert seven == pytest.approx(1, abs=1e-6)
    assert eight < 1e-6


def test_a_question_gives_the_same_bits_with_and_without_others(folder: Path) -> None:
    model = opened(folder)
    together = model.ask(QUESTIONS, DIGITS)
    assert [opened(folder).ask([question], DIGITS)[0] for question in QUESTIONS] == together
    assert model.ask(QUESTIONS[::-1], DIGITS)[::-1] == together


def test_a_digit_of_several_tokens_is_refused(tmp_path: Path) -> None:
    folder = other_folder(tmp_path / "spelt", "Qwen3ForCausalLM")
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text())
    document["normalizer"] = {"type": "Replace", "pattern": {"String": "7"}, "content": "se"}
    path.write_text(json.dumps(document))
    with pytest.raises(RewardError, match=r"theirs writes '7' as 2 tokens \(s, e\).*Fix: use a model whose"):
        opened(folder).ask(["?"], DIGITS)


def test_a_model_without_a_chat_template_cannot_be_asked(tmp_path: Path) -> None:
    folder = other_folder(tmp_path / "base", "Qwen3ForCausalLM")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(RewardError, match="theirs has no chat template"):
        opened(folder)


def test_the_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = other_folder(tmp_path / "small", "Qwen3ForCausalLM", vocab_size=200)
    with pytest.raises(
        RewardError, match=r"the tokenizer of the judge theirs has \d+ tokens, and the model embeds 200"
    ):
        opened(folder)


def test_a_question_that_is_too_long_is_an_error(folder: Path) -> None:
    with pytest.raises(RewardError, match="more than max_tokens 40"):
        opened(folder, 40).ask(["many words " * 30], DIGITS)


def test_a_folder_that_is_no_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="the tokenizer of judge theirs"):
        opened(tmp_path)


class ToldByTransformers:
    """What vLLM says, computed by transformers."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder)

    def log_probabilities(self, prompts: list[list[int]], tokens: list[int]) -> list[list[float]]:
        with torch.no_grad():
            found = [self._model(torch.tensor([prompt])).logits[0, -1].double() for prompt in prompts]
        return [torch.log_softmax(one, dim=-1)[tokens].tolist() for one in found]


def test_vllm_is_asked_for_the_same_tokens(folder: Path) -> None:
    told: Any = ToldByTransformers(folder)
    found = VllmJudge(told, ChatTokens(folder, "theirs", 100, {})).ask(QUESTIONS, DIGITS)
    expected = opened(folder).ask(QUESTIONS, DIGITS)
    assert all(one == pytest.approx(other, rel=1e-4) for one, other in zip(found, expected, strict=True))


@pytest.mark.slow
@pytest.mark.skipif(VLLM_PYTHON not in os.environ, reason=f"needs vLLM, in an environment of {VLLM_PYTHON}")
def test_vllm_gives_the_probabilities_of_transformers(tmp_path: Path) -> None:
    """Between 1e-10 and 1e-5 here. Logits of up to 30 are 0.125 apart in bfloat16; log p has the logit of the
    token and the largest one in it, and transformers in bfloat16 differs from float32 by up to 0.15."""
    folder = other_folder(tmp_path / "model", "Qwen3ForCausalLM", head_dim=32, hidden_size=64)
    found = VllmJudge(Vllm(folder, 1, 101), ChatTokens(folder, "theirs", 100, {})).ask(QUESTIONS, DIGITS)
    for one, other in zip(found, opened(folder).ask(QUESTIONS, DIGITS), strict=True):
        apart = max(abs(math.log(p) - math.log(q)) for p, q in zip(one, other, strict=True))
        assert apart < 2 * 0.125
        assert max(other) > 100 * min(other)


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as running:
        yield running


def asked(server: Server, requests: int = 8, **more: Any) -> ServerJudge:
    stated = {"url": server.url, "model": "theirs", "api": "chat", "requests": requests}
    return ServerJudge(Judge.model_validate({"server": stated, "revision": "1", "constitution": "c", **more}))


def says(best: dict[str, float] | None) -> Any:
    """A reply with these probabilities of the best tokens."""

    def show(handler: Handler) -> None:
        top = [{"token": token, "logprob": math.log(p)} for token, p in (best or {}).items()]
        logprobs = (
            None if best is None else {"content": [{"token": "x", "logprob": 0.0, "top_logprobs": top}]}
        )
        choice = {"index": 0, "finish_reason": "length", "message": {"content": "x"}, "logprobs": logprobs}
        handler.say(200, json.dumps({"choices": [choice]}).encode())

    return show


def test_a_server_is_asked_for_the_best_tokens_of_one_place(server: Server) -> None:
    server.faults = [says({"7": 0.5, " 7": 0.125, "８": 0.25, "I": 0.0625})]
    found = asked(server, chat_template_kwargs={"enable_thinking": False}).ask(["What?"], ("7", "8", "9"))
    assert found == [pytest.approx([0.625, 0.25, 0.0])]
    assert server.paths == ["/v1/chat/completions"]
    assert server.requests == [
        {"model": "theirs", "messages": [{"role": "user", "content": "What?"}], "max_tokens": 1, "n": 1,
         "temperature": 1.0, "logprobs": True, "top_logprobs": 20,
         "chat_template_kwargs": {"enable_thinking": False}}
    ]  # fmt: skip


def test_answers_of_a_server_belong_to_their_questions(server: Server) -> None:
    def repeat(handler: Handler) -> None:
        says({server.requests[-1]["messages"][0]["content"]: 1.0})(handler)

    server.faults = [repeat] * 4
    digits = ("1", "2", "3", "4")
    model = asked(server, requests=1)
    assert model.ask(digits, digits) == [[float(one == other) for other in digits] for one in digits]


@pytest.mark.parametrize("reply", [None, {}])
def test_a_server_without_log_probabilities_is_refused(server: Server, reply: Any) -> None:
    server.faults = [says(reply)]
    with pytest.raises(RewardError, match=r"returns no log-probabilities for model 'theirs'\. Fix"):
        asked(server).ask(["What?"], DIGITS)


def test_a_server_that_reasons_first_is_refused(server: Server) -> None:
    server.faults = [says({"<think>": 0.9, "The": 0.1})]
    with pytest.raises(RewardError, match=r"none of the 2 best tokens .* begin with '<think>', 'The'"):
        asked(server).ask(["What?"], DIGITS)


def test_a_reply_that_no_model_can_have_given_is_never_an_answer(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each field of a reply is left out, repeated, and of each other type or range."""
    monkeypatch.setattr("apertus_model.server_client.TRIES", 1)
    best = [{"token": "7", "logprob": -0.7}, {"token": "8", "logprob": -0.9}]
    reply = {"choices": [{"logprobs": {"content": [{"top_logprobs": best}]}}]}
    model = asked(server)
    server.faults = [replies(reply)]
    assert model.ask(["?"], ("7", "8")) == [pytest.approx([math.exp(-0.7), math.exp(-0.9)])]
    tried = 0
    for place, document in changed(reply):
        server.faults = [replies(document)]
        tried += 1
        try:
            [found] = model.ask(["?"], ("7", "8"))
        except ServerFailure as error:
            assert "did not answer question 1 of 1 in 1 tries: an answer that cannot be read" in str(error)
        except RewardError as error:
            assert "returns no log-probabilities" in str(error), place
        else:
            assert ".token" in place or ".logprob" in place or "emptied" in place or "[0]" in place
            assert all(0 <= one <= 1 for one in found) and sum(found) < 1, place
    assert tried > 40


@pytest.mark.parametrize(
    ("best", "told"),
    [
        ([("7", 1e4)], r"top_logprobs\[0\]\.logprob is 10000\.0: above 1e-06"),
        ([("7", -0.1)] * 3, "their probabilities sum to 2.715"),
        ([("7", -5.0)] * 2, "the token '7' is repeated"),
        ([(str(index), -9.0) for index in range(21)], "top_logprobs is .*: too long"),
    ],
)
def test_probabilities_that_cannot_be_are_a_broken_answer_that_is_named(
    server: Server, best: list[tuple[str, float]], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("apertus_model.server_client.TRIES", 2)
    monkeypatch.setattr("apertus_model.server_client.LONGEST_WAIT", 0.0)
    top = [{"token": token, "logprob": value} for token, value in best]
    server.faults = [replies({"choices": [{"logprobs": {"content": [{"top_logprobs": top}]}}]})] * 2
    with pytest.raises(ServerFailure, match=rf"/chat/completions did not answer question 1 of 1 .*{told}"):
        asked(server).ask(["?"], DIGITS)
    assert len(server.requests) == 2


def test_tokens_that_are_parts_of_characters_may_be_alike(server: Server) -> None:
    top = [{"token": token, "logprob": -1.5} for token in "\ufffd\ufffd7"]
    server.faults = [replies({"choices": [{"logprobs": {"content": [{"top_logprobs": top}]}}]})]
    assert asked(server).ask(["?"], ("7",)) == [pytest.approx([math.exp(-1.5)])]
