from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from apertus_model.tokenizer_files import (
    TokenizerError,
    changed,
    open_folder,
    open_tokenizer,
    set_state_aside,
)
from infra.store import Artifact

ROOT = Path(__file__).resolve().parents[2]
HARD = "a" * 50 + "b"
TEXT = "the quick brown fox jumps over the lazy dog " * 20
# What the library serialises. A new key needs a decision: does it change the tokens of a text from one use to
# another? Then `set_state_aside` sets it aside.
STATE = {"truncation", "padding", "dropout"}
VOCABULARY = {
    "version",
    "added_tokens",
    "normalizer",
    "pre_tokenizer",
    "post_processor",
    "decoder",
    "model",
} | {
    *("type", "vocab", "merges", "unk_token", "unk_id", "byte_fallback", "fuse_unk", "ignore_merges"),
    *("continuing_subword_prefix", "end_of_word_suffix", "max_input_chars_per_word"),
}


def _dropout(tokenizer: Tokenizer) -> None:
    tokenizer.model.dropout = 0.9


STATES: dict[str, Callable[[Tokenizer], Any]] = {
    "truncation": lambda tokenizer: tokenizer.enable_truncation(8),
    "padding": lambda tokenizer: tokenizer.enable_padding(length=5000, pad_token="<pad>", pad_id=10),
    "dropout": _dropout,
}


@pytest.mark.parametrize("model", [models.BPE, models.Unigram, models.WordLevel, models.WordPiece])
def test_all_that_the_library_serialises_is_known_as_state_or_as_vocabulary(model: Any) -> None:
    document = json.loads(Tokenizer(model()).to_str())
    assert {*document, *document["model"]} <= STATE | VOCABULARY
    assert set(STATES) == STATE


@pytest.mark.parametrize("state", STATES)
def test_no_token_depends_on_run_time_state_of_a_file(
    tokenizer: Artifact, tmp_path: Path, state: str
) -> None:
    expected = Tokenizer.from_file(str(tokenizer.local("tokenizer.json"))).encode(TEXT).ids
    (tmp_path / "tokenizer_config.json").write_bytes(tokenizer.bytes("tokenizer_config.json"))
    changed = Tokenizer.from_file(str(tokenizer.local("tokenizer.json")))
    STATES[state](changed)
    changed.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(TEXT).ids != expected
    assert open_tokenizer(tmp_path / "tokenizer.json").encode(TEXT).ids == expected
    for as_written in (False, True):
        theirs = open_folder(tmp_path, as_written=as_written)
        assert isinstance(theirs, PreTrainedTokenizerFast)
        assert theirs(TEXT)["input_ids"] == expected
    assert set_state_aside(changed) == [state]
    assert set_state_aside(changed) == []


CALLS: dict[str, Callable[[Any], Any]] = {
    "encode": lambda tokenizer: tokenizer.encode(HARD),
    "encode_batch": lambda tokenizer: tokenizer.encode_batch(["a", HARD]),
    "encode_batch_fast": lambda tokenizer: tokenizer.encode_batch_fast([HARD]),
    "train_from_iterator": lambda tokenizer: tokenizer.train_from_iterator([HARD]),
}


@pytest.fixture
def hard(tmp_path: Path) -> Path:
    """A folder whose tokenizer has a pattern that its library gives up on, with a panic, for `HARD`."""
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize("call", CALLS)
def test_a_panic_of_the_library_is_an_error_that_names_the_file(hard: Path, call: str) -> None:
    with pytest.raises(TokenizerError, match=f"{hard}/tokenizer.json fails in {call}: .*retry-limit.*Fix: "):
        CALLS[call](open_tokenizer(hard / "tokenizer.json"))
    with pytest.raises(TokenizerError, match=f"{hard}/tokenizer.json fails in {call}"):
        CALLS[call](
            changed(
                open_tokenizer(hard / "tokenizer.json"),
                Tokenizer.from_file(str(hard / "tokenizer.json")).to_str(),
            )
        )


@pytest.mark.parametrize("as_written", [False, True])
def test_a_panic_below_transformers_is_an_error_that_names_the_folder(hard: Path, as_written: bool) -> None:
    config = '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    (hard / "tokenizer_config.json").write_text(config)
    theirs = open_folder(hard, as_written=as_written, name="hf:theirs")
    for opened in (theirs, copy.deepcopy(theirs)):
        with pytest.raises(TokenizerError, match="the tokenizer hf:theirs fails in encode_batch: "):
            opened(HARD)
        assert opened.decode(opened("aab")["input_ids"]) == "a a b"


@pytest.mark.parametrize("content", ["", "{}", '{"model": {"type": "BPE"}}', "\0"])
def test_a_file_that_is_no_tokenizer_is_an_error_that_names_it(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match=f"the tokenizer {tmp_path}/tokenizer.json fails in from_file: "):
        open_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(TokenizerError, match=f"transformers cannot open the tokenizer of {tmp_path}: "):
        open_folder(tmp_path)


def test_tokenizers_are_opened_in_one_module() -> None:
    opens = re.compile(r"Tokenizer\w*\.from_(file|buffer|pretrained|str)[(,]")
    found = {
        str(path.relative_to(ROOT))
        for package in ("specs", "flows", "apertus_model", "infra")
        for path in (ROOT / package).rglob("*.py")
        if opens.search(path.read_text("utf-8"))
    }
    assert found == {"apertus_model/tokenizer_files.py"}
