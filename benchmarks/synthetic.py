"""Corpora for measurements: documents of log-normal length, as token files or as text, and files of any size
that take no room on the disk.

Invariant: everything is a function of its arguments; nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from apertus_model.data.tokens.megatron import MAGIC, VERSION, TokenFileWriter

BOS, EOS, VOCAB = 1, 2, 131_072
MEDIAN_TOKENS, SIGMA = 545, 1.1
"""Of the documents: mean 1,000 tokens, a hundredth of them above 7,000."""


def document_lengths(tokens: int, seed: int = 0) -> NDArray[np.int64]:
    """Lengths, 2 or more, of documents with `tokens` tokens together (a little over)."""
    random = np.random.default_rng(seed)
    lengths = 2 + random.lognormal(np.log(MEDIAN_TOKENS), SIGMA, tokens // 900 + 1000).astype(np.int64)
    return lengths[: int(np.searchsorted(np.cumsum(lengths), tokens)) + 1]


def write_corpus(prefix: Path, tokens: int, seed: int = 0) -> Path:
    """`prefix.bin/.idx` with uniform ids between one begin- and one end-of-document token."""
    random = np.random.default_rng(seed)
    with TokenFileWriter(prefix, "<i4") as writer:
        for length in document_lengths(tokens, seed).tolist():
            ids = random.integers(3, VOCAB, length, dtype=np.int32)
            ids[0], ids[-1] = BOS, EOS
            writer.write(ids)
    return prefix


def write_sparse_corpus(prefix: Path, lengths: NDArray[np.int64]) -> Path:
    """A pair whose `.bin` is one hole (all ids 0): as many bytes as a real one for whoever opens it, none
    on the disk."""
    sizes = lengths.astype("<i4")
    pointers = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype("<i8") * 4
    with open(f"{prefix}.bin", "wb") as file:
        os.truncate(file.fileno(), 4 * int(lengths.sum()))
    with open(f"{prefix}.idx", "wb") as file:
        file.write(struct.pack("<9sQBQQ", MAGIC, VERSION, 4, len(sizes), len(sizes) + 1))
        for table in (sizes, pointers, np.arange(len(sizes) + 1, dtype="<i8")):
            table.tofile(file)
    return prefix


def write_text(path: Path, tokens: int, seed: int = 0) -> Path:
    """JSONL with `text`: about `tokens` words, drawn by Zipf's law from 30,000 made of syllables."""
    random = np.random.default_rng(seed)
    syllables = ["".join(pair) for pair in zip("bdfgklmnprstvz" * 5, "aeiou" * 14, strict=True)]
    words = np.array(["".join(random.choice(syllables, random.integers(1, 5))) for _ in range(30_000)])
    with open(path, "w", encoding="utf-8") as file:
        for length in document_lengths(tokens, seed).tolist():
            ranks = np.minimum(random.zipf(1.2, length), len(words)) - 1
            file.write(json.dumps({"text": " ".join(words[ranks])}) + "\n")
    return path
