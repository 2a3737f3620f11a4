from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from apertus_model.tokenizer_files import open_folder, open_tokenizer, set_state_aside
from infra.store import Artifact

ROOT = Path(__file__).resolve().parents[2]
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


def test_tokenizers_are_opened_in_one_module() -> None:
    opens = re.compile(r"Tokenizer\w*\.from_(file|buffer|pretrained)\(")
    found = {
        str(path.relative_to(ROOT))
        for package in ("specs", "flows", "apertus_model", "infra")
        for path in (ROOT / package).rglob("*.py")
        if opens.search(path.read_text("utf-8"))
    }
    assert found == {"apertus_model/tokenizer_files.py", "apertus_model/stages/tokenizer.py"}
