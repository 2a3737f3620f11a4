"""Counts of tokens on lines, beside a vocabulary that is small enough to count by hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from apertus_model.data.tokens.vocabulary import train
from apertus_model.evaluation.token_counts import (
    Counts,
    read_counts,
    renyi_efficiency,
    whole_words,
    words,
)
from apertus_model.tokenizer_files import open_tokenizer
from infra.store.inputs import SourceError

VOCABULARY = {"<unk>": 0, "a": 1, "b": 2, "ab": 3, "c": 4, " ": 5}


def tiny(unknown: str | None = "<unk>") -> Tokenizer:
    """Pairs `ab` are one token, other letters one each."""
    model = models.BPE(vocab=VOCABULARY, merges=[("a", "b")], unk_token=unknown)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def test_a_tiny_vocabulary_is_counted_by_hand(tmp_path: Path) -> None:
    counts = Counts(tiny())
    counts.add("x", ["1", "2"], ["ab c", "aab x"])  # ab, space, c; a, ab, space, unknown
    counts.write(tmp_path / "counts.parquet")
    (found,) = read_counts(tmp_path / "counts.parquet").values()
    assert {name: column.tolist() for name, column in found.items()} == {
        "tokens": [3, 4],
        "whole_words": [2, 1],
        "unknown": [0, 1],
        "restored": [1, 0],
    }
    occurrences = {"ab": 2, " ": 2, "a": 1, "c": 1, "<unk>": 1}
    power = sum((count / 7) ** 2.5 for count in occurrences.values())
    assert counts.of_vocabulary() == {
        "vocabulary_used": 5 / 6,
        "renyi_efficiency": pytest.approx(math.log(power) / (1 - 2.5) / math.log(6), rel=1e-12),
        "unknown_tokens": 1,
        "changed_lines": 1,
    }


def test_a_uniform_vocabulary_is_fully_efficient() -> None:
    assert renyi_efficiency(np.full(50, 3), 50) == pytest.approx(1)


def test_counts_are_those_of_transformers_whatever_the_file_says(tmp_path: Path) -> None:
    texts = ["Zürich ist schön", "東京は大きい", "a  b\t</s>", "🤗" * 30]
    tokenizer = train(texts * 3, 512, 100)
    plain = [
        len(ids)
        for ids in PreTrainedTokenizerFast(tokenizer_object=tokenizer)(texts, add_special_tokens=False)[
            "input_ids"
        ]
    ]
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=100)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    counts = Counts(open_tokenizer(tmp_path / "tokenizer.json"))
    counts.add("x", list("1234"), texts)
    assert counts.columns["tokens"] == plain and counts.tokens == sum(plain)
    assert counts.columns["restored"] == [True] * 4


def test_a_word_is_whole_when_one_token_covers_it() -> None:
    tokenizer = train(["der Hund und der Mund"] * 9, 512, 100)
    tokenizer.add_tokens([AddedToken("in der", normalized=False)])
    text = "der Hundx 東 in der"  # one token; two; several bytes of one character; one token for both words
    assert (words(text), whole_words(text, tokenizer.encode(text, add_special_tokens=False))) == (5, 3)


def test_gaps_in_the_ids_are_not_part_of_the_vocabulary() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 90, "?": 91}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    counts = Counts(tokenizer)
    counts.add("x", ["1"], ["a b"])
    assert (counts.vocabulary, counts.of_vocabulary()["vocabulary_used"]) == (3, 2 / 3)


def test_the_unknown_token_of_a_unigram_model_is_counted() -> None:
    counts = Counts(Tokenizer(models.Unigram([("?", 0.0), ("a", -1.0)], unk_id=0)))
    counts.add("x", ["1"], ["aza"])
    assert counts.columns["unknown"] == [1]


def test_a_line_without_a_token_is_refused() -> None:
    with pytest.raises(SourceError, match=r"makes no token of line '7' in 'ja'"):
        Counts(tiny(None)).add("ja", ["7"], ["東"])


def test_a_line_of_a_mebibyte_is_counted() -> None:
    counts = Counts(tiny())
    counts.add("x", ["1"], ["ab c" * 2**18])
    # the first and the last word are "ab" and "c", those between "cab"
    assert counts.columns["tokens"] == [3 * 2**18] and counts.columns["whole_words"] == [2]
