"""A folder of another architecture: kept as it is, sampled from, and its answers measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from apertus_model.data.rows import Rows
from infra.store import Artifact
from infra.store.hugging_face import FOLDER_FILES, open_model
from infra.store.inputs import SourceError
from tests.apertus_model.other_models import KINDS, other_folder
from tests.apertus_model.preference_artifacts import encoder_of, put_rows

QUESTIONS = ["the question", "where is the text, and what is in it?"]


def kept(bench: Any, folder: Path) -> Artifact:
    files = [*open_model(str(folder)).files, *FOLDER_FILES]
    return bench.run("model_folder", "m", {"url": str(folder), "files": files, "reference": "other"})


def asked(bench: Any, tokenizer: Artifact) -> Artifact:
    encoder = encoder_of(tokenizer)
    rows = [
        {
            "id": str(index),
            "messages": [{"role": "user", "content": text}],
            "tokens": encoder.prompt([{"role": "user", "content": text}]).tolist(),
            "completions": [],
        }
        for index, text in enumerate(QUESTIONS)
    ]
    return put_rows(bench, "prompts", "p", rows, {"end_of_turn_id": encoder.end_of_turn_id, "pad_id": 10})


def completed(bench: Any, tokenizer: Artifact, model: Artifact, **sampling: Any) -> Artifact:
    spec = {"sampling": {"n": 2, "max_new_tokens": 5, "batch_size": 2} | sampling}
    inputs = {"model": model, "prompts": asked(bench, tokenizer), "tokenizer": tokenizer}
    return bench.run("completions", "c", spec, inputs)


@pytest.mark.parametrize("architecture", KINDS)
def test_greedy_answers_are_the_most_probable_tokens_after_its_own_prompt(
    bench: Any, tokenizer: Artifact, tmp_path: Path, architecture: str
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = other_folder(tmp_path / "model", architecture)
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    for row, question in zip(
        Rows(completed(bench, tokenizer, kept(bench, folder), temperature=0)), QUESTIONS, strict=True
    ):
        messages = [{"role": "user", "content": question}]
        prompt = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        tokens = list(prompt)
        with torch.no_grad():  # without cache, padding or batch
            for _ in range(5):
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        text = theirs.decode(tokens[len(prompt) :], skip_special_tokens=True)
        ours = encoder_of(tokenizer).completion(text).tolist()[:-1]
        assert row["completions"] == [{"text": text, "tokens": ours, "finished": False}] * 2


def test_its_own_end_of_the_turn_ends_an_answer_which_is_measured(
    bench: Any, tokenizer: Artifact, tmp_path: Path
) -> None:
    folder = other_folder(tmp_path / "model", "Qwen3ForCausalLM", favourite="<|im_end|>")
    completions = completed(bench, tokenizer, kept(bench, folder))
    end = encoder_of(tokenizer).end_of_turn_id
    expected = {"text": "", "tokens": [end], "finished": True}
    assert [row["completions"] for row in Rows(completions)] == [[expected] * 2] * 2
    part = {"model": None, "sequence_length": 128, "samples": 1, "source_names": [], "shown": 1, "answers": 2}
    prompts = Artifact(bench.store, "prompts/p")
    found = bench.run("evaluate", "e", part, {"prompts": prompts, "completions": completions})
    sampled = completions.manifest.metrics
    seconds = sampled["tokens"] / sampled["tokens_per_second"] / 2  # of two answers
    metrics = {"reward/prompts": 2.0, "reward/finished": 1.0}
    assert found.manifest.metrics == metrics | {"answers/seconds": seconds}
    assert json.loads(found.local("metrics.json").read_text()) == metrics


def test_the_folder_is_kept_as_it_is_without_its_code(bench: Any, tmp_path: Path) -> None:
    folder = other_folder(tmp_path / "model", "LlamaForCausalLM")
    (folder / "modeling_llama.py").write_text("raise SystemExit")
    artifact = kept(bench, folder)
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert set(artifact.manifest.files) == names | {"tokenizer_config.json"}
    assert all(artifact.bytes(name) == (folder / name).read_bytes() for name in artifact.manifest.files)


def test_a_folder_that_has_gone_since_the_plan_is_a_message(bench: Any, tmp_path: Path) -> None:
    part = {"url": str(tmp_path / "gone"), "files": ["config.json"], "reference": "other"}
    with pytest.raises(SourceError, match=r"gone no longer has a config\.json"):
        bench.run("model_folder", "m", part)
