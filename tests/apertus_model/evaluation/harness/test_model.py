from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("lm_eval", reason="the extra `harness` is not installed")

from lm_eval.api.instance import Instance

from apertus_model.evaluation.harness.model import LOGITS, MOST_ROWS, BatchedModel, open_model, rows_in
from apertus_model.evaluation.harness.tasks import installed_version
from apertus_model.vllm_client import VLLM_PYTHON
from specs.stages.harness import HarnessPart, Suite
from tests.snapshots.model import with_bos, write_model


def test_a_batch_has_as_many_rows_as_its_logits_have_room() -> None:
    assert rows_in(10, 512) == MOST_ROWS
    assert rows_in(4096, 131_072) == 1
    for longest in (1, 7, 100, 1000, 5000):
        rows = rows_in(longest, 131_072)
        assert rows == 1 or rows * longest * 131_072 * 8 <= LOGITS
        assert rows in (1, 2, 4, 8, 16, 32, 64)


def test_every_request_is_in_one_batch_with_room_for_its_longest() -> None:
    from lm_eval.models.utils import Collator

    model = object.__new__(BatchedModel)
    model.__dict__["_vocabulary"] = 131_072
    model._max_length = 100_000
    lengths = [5000, 2000, 2000, 900, 900, 900, *[300] * 30, *[10] * 200]
    requests: list[Any] = [("text", [1] * (length - 1), [1]) for length in lengths]
    batches = [
        [len(one[1]) + 1 for one in batch]
        for batch in Collator.get_chunks(requests, fn=model._batch_scheduler)
    ]
    assert [length for batch in batches for length in batch] == lengths
    assert [len(batch) for batch in batches][:4] == [1, 2, 4, 8]
    assert all(len(batch) <= rows_in(batch[0], 131_072) for batch in batches)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = write_model(tmp_path_factory.mktemp("model"), ["which number is it, and how many words"])
    return open_model(folder, HarnessPart(suite=Suite(tasks=["x"])))


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("loglikelihood", [(f"number {index} is", " how many") for index in range(21)]),
        ("loglikelihood_rolling", [(f"{index} words how many",) for index in range(21)]),
        ("generate_until", [(f"number {index} is", {"max_gen_toks": 4}) for index in range(21)]),
    ],
)
def test_batches_are_halved_until_they_fit_the_memory(
    model: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    arguments: list[Any],
) -> None:
    requests = [Instance(kind, {}, one, index) for index, one in enumerate(arguments)]
    ask, sizes = getattr(model, kind), []
    whole = ask(requests)
    assert "exceed the memory" not in capsys.readouterr().out
    inner = model.model.forward

    def forward(tokens: Any = None, **more: Any) -> Any:
        rows = len(more["input_ids"] if tokens is None else tokens)
        sizes.append(rows)
        if rows > 5:
            raise torch.OutOfMemoryError("no room")
        return inner(tokens, **more) if tokens is not None else inner(**more)

    monkeypatch.setattr(model.model, "forward", forward)
    found = ask(requests)
    if kind == "generate_until":
        assert found == whole
    else:
        np.testing.assert_allclose(np.array(found, float), np.array(whole, float), atol=1e-5)
    assert max(size for size in sizes if size <= 5) == 4
    assert "requests at once exceed the memory: no room; now half as many" in capsys.readouterr().out


def test_one_request_that_exceeds_the_memory_is_an_error(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(model.model, "forward", forward)
    with pytest.raises(torch.OutOfMemoryError):
        model.loglikelihood([Instance("loglikelihood", {}, ("which", " number"), 0)])


@pytest.fixture(scope="module", params=["with a BOS", "without"])
def short(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model of 16 tokens of context, whose tokenizer begins texts with a BOS, as those made here do, or
    does not. A token is a byte, and the BOS is id 0."""
    folder = write_model(tmp_path_factory.mktemp("short"), [], initializer_range=0.5)
    if request.param == "with a BOS":
        with_bos(folder)
    opened: Any = open_model(folder, HarnessPart(suite=Suite(tasks=["x"], max_length=16)))
    assert (opened.tok_encode("it")[0] == 0) == (request.param == "with a BOS")
    return opened


def by_hand(model: Any, read: list[int], asked: list[int]) -> float:
    """The sum of log p of tokens after those that the model has read, in one forward pass."""
    with torch.no_grad():
        logits = model.model(torch.tensor([read + asked[:-1]])).logits[0].double()
    return logits.log_softmax(-1)[-len(asked) :].gather(1, torch.tensor(asked)[:, None]).sum().item()


def ids_of(model: Any, text: str) -> list[int]:
    return model.tokenizer.encode(text, add_special_tokens=False)  # type: ignore[no-any-return]


def test_a_whole_text_is_scored_after_one_bos(short: Any) -> None:
    """A text of several windows too, and one that spells the BOS. Each window after the first reads as much
    before its tokens as the context holds, as the harness defines it."""
    texts = ["it", "word", "which number is it, and how many words", "<s>it", ""]
    found = short.loglikelihood_rolling(
        [Instance("loglikelihood_rolling", {}, (text,), index) for index, text in enumerate(texts)]
    )
    assert len(ids_of(short, texts[2])) % 16 > 0 and short.max_length == 16
    for text, log_likelihood in zip(texts, found, strict=True):
        ids, expected = ids_of(short, text.removeprefix("<s>")), 0.0
        for begin in range(0, len(ids), 16):
            asked = ids[begin : begin + 16]
            read = ids[begin + len(asked) - 17 : begin] if begin else [0]
            expected += by_hand(short, read, asked)
        assert log_likelihood == pytest.approx(expected, rel=1e-5, abs=1e-6), text


def test_a_continuation_and_an_answer_follow_one_bos(short: Any) -> None:
    chat = short.tokenizer.bos_token + short.apply_chat_template([{"role": "user", "content": "it"}])
    begin = ids_of(short, "<s>") if short.tok_encode("it")[0] == 0 else []
    asked = {("it is", " how"): begin, ("", "how"): [0], (chat, "how"): []}
    found = short.loglikelihood(
        [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(asked)]
    )
    for ((context, continuation), first), (log_likelihood, _) in zip(asked.items(), found, strict=True):
        expected = by_hand(short, first + ids_of(short, context), ids_of(short, continuation))
        assert log_likelihood == pytest.approx(expected, rel=1e-5, abs=1e-6), context
    for context, first in {"it is": begin, chat: []}.items():
        read, answer = first + ids_of(short, context), []
        for _ in range(3):
            with torch.no_grad():
                answer.append(int(short.model(torch.tensor([read + answer])).logits[0, -1].argmax()))
        (text,) = short.generate_until(
            [Instance("generate_until", {}, (context, {"max_gen_toks": 3, "until": []}), 0)]
        )
        assert text == short.tokenizer.decode(answer, skip_special_tokens=True)


class Told:
    """Stands for the process of vLLM: answers with the kind, and the texts of the requests."""

    def __init__(self, engine: dict[str, Any], packages: str) -> None:
        self.engine, self.packages = engine, packages

    def ask(self, question: dict[str, Any]) -> list[Any]:
        self.asked = question["requests"]
        return [[question["kind"], one[0]] for one in self.asked]


def test_vllm_is_asked_through_the_harness_of_its_environment_on_all_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("apertus_model.evaluation.harness.model.VllmProcess", Told)
    folder = write_model(tmp_path / "model", ["which number is it"])
    suite = Suite(tasks=["x"], max_length=512, seed=3)
    opened: Any = open_model(folder, HarnessPart(suite=suite, engine="vllm"), gpus=4)
    told, harness = opened._process, installed_version()
    assert told.engine == {
        "lm_eval": harness,
        "pretrained": str(folder),
        "dtype": "auto",
        "tensor_parallel_size": 4,
        "batch_size": "auto",
        "max_length": 512,
        "hf_overrides": None,
        "trust_remote_code": False,
        "load_format": "safetensors",
        "seed": 3,
    }
    longer: Any = open_model(folder, HarnessPart(suite=Suite(tasks=["x"], max_length=4609), engine="vllm"))
    assert longer._process.engine["hf_overrides"] == {"max_position_embeddings": 4609}
    assert told.packages == f"vllm lm_eval=={harness}"
    for kind, arguments in {
        "loglikelihood": ("which", " number"),
        "loglikelihood_rolling": ("which number",),
        "generate_until": ("which", {"until": ["."]}),
    }.items():
        assert getattr(opened, kind)([Instance(kind, {}, arguments, 0)]) == [[kind, arguments[0]]]
    assert opened.tokenizer("number")["input_ids"]
    for stated, sent in (
        ({"until": ["."]}, {"temperature": 0.0, "until": ["."]}),
        ({"temperature": 0.5}, {"temperature": 0.5}),
        ({"do_sample": True}, {"do_sample": True}),
    ):
        opened.generate_until([Instance("generate_until", {}, ("which", stated), 0)])
        assert told.asked == [("which", sent)]


@pytest.mark.slow
@pytest.mark.skipif(VLLM_PYTHON not in os.environ, reason=f"needs vLLM, in an environment of {VLLM_PYTHON}")
def test_vllm_answers_what_transformers_does(tmp_path: Path) -> None:
    """In bfloat16: of the tokens generated here the second best ones are half as likely."""
    folder = write_model(
        tmp_path / "model", ["which number is it, and how many words"], head_dim=32, initializer_range=0.3
    )
    part = HarnessPart(suite=Suite(tasks=["x"]))
    ours, theirs = (
        open_model(folder, part.model_copy(update={"engine": engine})) for engine in ("transformers", "vllm")
    )
    asked = [(f"number {index} is", " how many") for index in range(20)]
    requests = [Instance("loglikelihood", {}, one, index) for index, one in enumerate(asked)]
    found = np.array(theirs.loglikelihood(requests), float)
    np.testing.assert_allclose(found, np.array(ours.loglikelihood(requests), float), atol=0.1)
    whole = [Instance("loglikelihood_rolling", {}, (f"{index} words",), index) for index in range(3)]
    np.testing.assert_allclose(
        theirs.loglikelihood_rolling(whole), ours.loglikelihood_rolling(whole), atol=0.1
    )
    arguments = {"max_gen_toks": 4, "until": []}
    greedy = [Instance("generate_until", {}, ("it many number", arguments), 0)]
    assert theirs.generate_until(greedy) == theirs.generate_until(greedy) == ours.generate_until(greedy)
