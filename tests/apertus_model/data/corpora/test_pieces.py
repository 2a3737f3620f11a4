from __future__ import annotations

from pydoc_data import topics
from random import Random

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from apertus_model.data.corpora import tokenise
from apertus_model.data.tokens.vocabulary import train

TEXTS = list(topics.topics.values())
TEXT = "\n\n".join(TEXTS[:40]) + "人工知能は言葉を読む。" * 40 + " été, Ångström—1234 " * 50
TYPE = np.dtype(np.int32)


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    return train([*TEXTS, TEXT], 2000, 100)


def _trained(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=1000, show_progress=False))
    return tokenizer


def _of_whole(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("size", [300, 1000, 2**20])
def test_the_tokens_of_the_pieces_are_those_of_the_whole(
    ours: Tokenizer, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(tokenise, "PIECE", size)
    cut = list(tokenise.pieces(ours, TEXT))
    assert "".join(cut) == TEXT
    assert max(map(len, cut)) < size + 300 and (len(cut) > 50) == (size < 2000)
    short = "a short one"
    found = tokenise.encode(ours, [short, TEXT, ""], TYPE)
    assert [one.tolist() for one in found] == [_of_whole(ours, text) for text in (short, TEXT, "")]
    assert all(one.dtype == TYPE for one in found)


def test_other_tokenizers_are_cut_where_their_tokens_allow_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenise, "PIECE", 2000)
    text = " ".join(TEXTS[50:60])
    for before in (
        pre_tokenizers.ByteLevel(add_prefix_space=True),
        pre_tokenizers.Metaspace(prepend_scheme="first"),
        pre_tokenizers.Whitespace(),
    ):
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = before
        tokenizer = _trained(tokenizer)
        (found,) = tokenise.encode(tokenizer, [text], TYPE)
        assert found.tolist() == _of_whole(tokenizer, text), before


def test_a_word_without_end_is_cut_anyway(ours: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenise, "PIECE", 1000)
    word = "".join(Random(0).choices("abcdefghijklmnopqrstuvwxyz", k=5500))
    assert [len(piece) for piece in tokenise.pieces(ours, f"{word} and more")] == [*[1000] * 4, 1500, 9]
    (found,) = tokenise.encode(ours, [word], TYPE)
    assert ours.decode(found.tolist()) == word
