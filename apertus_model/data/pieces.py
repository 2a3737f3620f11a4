"""Tokenises texts of any length in bounded memory: the tokenizers library takes some 130 bytes for each byte
of text that it encodes at once.

Invariants:
- A text of at most PIECE characters is encoded whole. A longer one is cut where words end, at places where
  the AROUND characters on both sides have the same tokens whether encoded together or apart; so its tokens
  are those of the whole text.
- If none of the next TRIES ends of words is such a place, or the next PIECE characters contain no end of a
  word, the text is cut after PIECE characters: in a word of that length, or for a tokenizer that marks where
  texts begin. Its tokens are then those of the pieces.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

PIECE = 2**20
AROUND = 256
TRIES = 64
_END_OF_WORD = re.compile(r"(?<=\w)(?=\W)")


def encode(tokenizer: Tokenizer, texts: Sequence[str], dtype: np.dtype) -> list[NDArray[np.integer]]:
    """The ids of each text, (n,) of `dtype`, without special tokens at its ends."""
    if all(len(text) <= PIECE for text in texts):
        return _ids(tokenizer, texts, dtype)
    return [
        np.concatenate([ids for piece in pieces(tokenizer, text) for ids in _ids(tokenizer, [piece], dtype)])
        for text in texts
    ]


def pieces(tokenizer: Tokenizer, text: str) -> Iterator[str]:
    """The parts of a text that are encoded separately."""
    start = 0
    while len(text) - start > PIECE:
        stop = _cut(tokenizer, text, start + PIECE)
        yield text[start:stop]
        start = stop
    yield text[start:]


def _cut(tokenizer: Tokenizer, text: str, least: int) -> int:
    """The position, `least` or later, at which the text is cut."""
    ends = _END_OF_WORD.finditer(text, least, least + PIECE)
    for end in (match.start() for match in islice(ends, TRIES)):
        before, after = text[end - AROUND : end], text[end : end + AROUND]
        both, one, other = _ids(tokenizer, [before + after, before, after], np.dtype(np.int64))
        if np.array_equal(both, np.concatenate([one, other])):
            return end
    return least


def _ids(tokenizer: Tokenizer, texts: Sequence[str], dtype: np.dtype) -> list[NDArray[np.integer]]:
    return [
        np.array(one.ids, dtype) for one in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    ]
