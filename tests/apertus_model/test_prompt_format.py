"""How models of other architectures are asked, compared with transformers' own `apply_chat_template`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from apertus_model.prompt_format import GenerationError, OtherFormat, OwnFormat
from infra.store import Artifact
from tests.apertus_model.other_models import KINDS, other_folder

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "the question"},
    {"role": "assistant", "content": "the answer"},
    {"role": "user", "content": "and then?"},
]


def opened(folder: Path, tokenizer: Artifact, max_new_tokens: int = 8) -> OtherFormat:
    return OtherFormat(folder, tokenizer.local("tokenizer.json"), max_new_tokens)


@pytest.mark.parametrize("architecture", KINDS)
def test_a_model_reads_what_its_own_template_and_tokenizer_make(
    tmp_path: Path, tokenizer: Artifact, architecture: str
) -> None:
    from transformers import AutoTokenizer

    folder = other_folder(tmp_path / "model", architecture)
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    written = opened(folder, tokenizer)
    assert written.tokens({"id": "p", "messages": MESSAGES}) == expected
    special = KINDS[architecture][1]
    assert set(written.end_ids) == {0, special.index(special[-1])}


def test_an_answer_of_another_model_is_stored_with_the_tokens_of_our_tokenizer(
    tmp_path: Path, tokenizer: Artifact
) -> None:
    folder = other_folder(tmp_path / "model", "Qwen3ForCausalLM")
    written = opened(folder, tokenizer)
    own = OwnFormat(tokenizer.local("tokenizer.json"), written.encoder.end_of_turn_id, 10)
    completion = written.completion(
        [*written._its("the answer", add_special_tokens=False)["input_ids"], 2, 9, 9]
    )
    ours = written.encoder.completion("the answer").tolist()
    assert completion == {"text": "the answer", "tokens": ours, "finished": True}
    assert own.completion(ours) == completion
    cut = written.completion(written._its("the answer", add_special_tokens=False)["input_ids"])
    assert cut == {"text": "the answer", "tokens": ours[:-1], "finished": False}


def test_a_prompt_beyond_the_context_of_the_model_is_a_message(tmp_path: Path, tokenizer: Artifact) -> None:
    folder = other_folder(tmp_path / "model", "LlamaForCausalLM", max_position_embeddings=64)
    with pytest.raises(GenerationError, match=r"prompt p has \d+ tokens of this model.*room for 56 beside"):
        opened(folder, tokenizer).tokens({"id": "p", "messages": [{"role": "user", "content": "xyz " * 50}]})


def test_messages_that_the_template_refuses_are_a_message(tmp_path: Path, tokenizer: Artifact) -> None:
    folder = other_folder(tmp_path / "model", "Olmo2ForCausalLM")
    call = {"name": "now", "arguments": {}}
    blocks = [{"type": "tool_calls", "calls": [call]}, {"type": "tool_outputs", "outputs": ["noon"]}]
    messages = [{"role": "user", "content": "When?"}, {"role": "assistant", "content": blocks}]
    with pytest.raises(
        GenerationError, match=r"prompt p: the chat template of .*/model fails: no tools here"
    ):
        opened(folder, tokenizer).tokens({"id": "p", "messages": messages})


def test_a_model_without_a_template_is_a_message(tmp_path: Path, tokenizer: Artifact) -> None:
    folder = other_folder(tmp_path / "model", "Qwen3ForCausalLM")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(GenerationError, match=r"has no chat template. Fix: add its chat_template\.jinja"):
        opened(folder, tokenizer)


def test_a_model_whose_list_of_ends_is_empty_is_a_message(tmp_path: Path, tokenizer: Artifact) -> None:
    folder = other_folder(tmp_path / "model", "Qwen3ForCausalLM")
    (folder / "generation_config.json").write_text('{"eos_token_id": []}')
    with pytest.raises(GenerationError, match=r"nothing ends a turn\. Fix: set eos_token_id"):
        opened(folder, tokenizer)
