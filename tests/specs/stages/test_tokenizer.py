"""Where a tokenizer comes from, and the room that its vocabulary needs."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from specs.stages.tokenizer import TokenizerStage


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "give either sources to train on, or the path"),
        ({"sources": ["a"], "path": "/folder"}, "give either sources to train on, or the path"),
        ({"path": "/folder", "from": "hf:/model"}, "give either sources to train on, or the path"),
        ({"from": "pretrain"}, "'pretrain' is not a Hugging Face model"),
        ({"sources": ["a"], "vocab_size": 256}, "no room for 100 special tokens and 256 bytes; take 356"),
        ({"sources": ["a"], "vocab_size": 384, "reserved": 129}, "no room for 129 special tokens"),
    ],
)
def test_a_tokenizer_that_cannot_be_made_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TokenizerStage.model_validate({"kind": "tokenizer", **fields})


def test_special_tokens_and_bytes_may_fill_the_vocabulary() -> None:
    stage = TokenizerStage(kind="tokenizer", sources=["a"], vocab_size=384, reserved=128)
    assert stage.vocab_size == 384
    assert TokenizerStage(kind="tokenizer", path="/folder", vocab_size=128).sources == []
