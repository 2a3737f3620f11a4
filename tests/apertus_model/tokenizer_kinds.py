"""A tokenizer of every kind that the tokenizers library can make, with the tokens of the chat format."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from tokenizers import AddedToken, Tokenizer, models
from tokenizers import normalizers as norm
from tokenizers import pre_tokenizers as pre

from apertus_model.chat.template import CONTROL_TOKENS

NORMALIZERS: dict[str, Any] = {
    "BertNormalizer": norm.BertNormalizer(),
    "ByteLevel": norm.ByteLevel(),
    "Lowercase": norm.Lowercase(),
    "NFC": norm.NFC(),
    "NFD": norm.NFD(),
    "NFKC": norm.NFKC(),
    "NFKD": norm.NFKD(),
    "Nmt": norm.Nmt(),
    "Prepend": norm.Prepend("▁"),
    "Replace": norm.Replace(" ", "▁"),
    "Sequence": norm.Sequence([norm.Prepend("▁"), norm.Replace(" ", "▁")]),
    "Strip": norm.Strip(),
    "StripAccents": norm.StripAccents(),
}
"""All but `Precompiled`, which needs a table that only sentencepiece makes."""
PRE_TOKENIZERS: dict[str, list[Any]] = {
    "BertPreTokenizer": [pre.BertPreTokenizer()],
    "ByteLevel": [pre.ByteLevel(add_prefix_space=prefix) for prefix in (True, False)],
    "CharDelimiterSplit": [pre.CharDelimiterSplit(" ")],
    "Digits": [pre.Digits()],
    "FixedLength": [pre.FixedLength(3)],
    "Metaspace": [pre.Metaspace(prepend_scheme=scheme) for scheme in ("first", "always", "never")],
    "Punctuation": [pre.Punctuation()],
    "Sequence": [pre.Sequence([pre.WhitespaceSplit(), pre.Metaspace(prepend_scheme="first")])],
    "Split": [pre.Split(" ", "merged_with_next")],
    "UnicodeScripts": [pre.UnicodeScripts()],
    "Whitespace": [pre.Whitespace()],
    "WhitespaceSplit": [pre.WhitespaceSplit()],
}
CHARACTERS = [
    "<unk>",
    *sorted({*map(chr, range(32, 127)), *pre.ByteLevel.alphabet(), *"▁é\n\t日\u0301\u0338"}),
]
VOCABULARY = {character: index for index, character in enumerate(CHARACTERS)}
MODELS: dict[str, Any] = {
    "BPE": models.BPE(vocab=VOCABULARY, merges=[], unk_token="<unk>"),
    "Unigram": models.Unigram(vocab=[(character, -1.0) for character in CHARACTERS], unk_id=0),
    "WordLevel": models.WordLevel(vocab=VOCABULARY, unk_token="<unk>"),
    "WordPiece": models.WordPiece(vocab=VOCABULARY, unk_token="<unk>"),
}
OPTIONS = ("lstrip", "rstrip", "single_word", "normalized")  # of an added token


def make(model: str = "BPE", normalizer: Any = None, pre_tokenizer: Any = None, **options: bool) -> Tokenizer:
    """A tokenizer; `options`: those of its control tokens."""
    tokenizer = Tokenizer(MODELS[model])
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.add_special_tokens(
        [AddedToken(token, **({"normalized": False} | options)) for token in CONTROL_TOKENS]
    )
    return tokenizer


def kinds() -> Iterator[dict[str, Any]]:
    """Arguments of `make`: every part of a tokenizer, each with every combination of options."""
    parts = [{"model": model} for model in MODELS]
    parts += [{"normalizer": one} for one in NORMALIZERS.values()]
    parts += [{"pre_tokenizer": one} for some in PRE_TOKENIZERS.values() for one in some]
    for part, values in itertools.product(parts, itertools.product([False, True], repeat=len(OPTIONS))):
        yield {**part, **dict(zip(OPTIONS, values, strict=True))}
