"""Hashes and signatures of documents, and groups of similar documents.

Invariants:
- A signature depends on the text and the spec.
- Computing a signature takes 128 KiB per hash of each bucket, and a few copies of the text.

Signatures are datatrove's (`MinhashDedupSignature`, as for FineWeb). Its later steps are not used: they
choose the document to keep by the number and position of its file, and require a constant number of tasks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np
from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature
from datatrove.utils.hashing import create_hash_func
from numpy.typing import NDArray

from apertus_model.data.corpora.components import join, roots_of
from apertus_model.data.corpora.words import Words, simplified, split
from specs.filters import NearDuplicatesFilter

SHINGLES = 4096
PRIME = np.uint64(2**61 - 1)


def text_hash(text: str, person: bytes = b"") -> int:
    """64 bits of BLAKE2b over the UTF-8 bytes, little endian. The expected number of collisions among n
    different texts is n^2 / 2^65: 0.03 among 10^9. Hashes of another `person` are independent."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8, person=person).digest(), "little")


class MinHash:
    """The signatures that one spec describes."""

    def __init__(self, spec: NearDuplicatesFilter) -> None:
        self._config = MinhashConfig(spec.ngram, spec.buckets, spec.hashes_per_bucket, spec.seed)
        self._factors, self._summands = MinhashDedupSignature(".", self._config, language=Words()).parameters
        self._hash = create_hash_func(self._config.hash_config)
        self.buckets = spec.buckets

    def hashes(self, text: str) -> NDArray[np.uint64] | None:
        """(buckets, hashes_per_bucket): the least value of each hash function over the document's n-grams.
        Two documents agree in one with a probability equal to their Jaccard similarity. None for a document
        with fewer words than an n-gram."""
        parts = [self._least(shingles) for shingles in self._shingles(text)]
        if not parts:
            return None
        least: NDArray[np.uint64] = np.min(parts, axis=0).reshape(self.buckets, -1)
        return least

    def _shingles(self, text: str) -> Iterator[NDArray[np.uint64]]:
        """Hashes of n-grams, (n, 1), at most SHINGLES at a time."""
        size = self._config.n_grams
        words = split(simplified(text, self._config.norm_config))
        held = list(islice(words, SHINGLES + size - 1))
        while len(held) >= size:
            grams = zip(*(held[start:] for start in range(size)), strict=False)
            yield np.fromiter(map(self._hash, map(" ".join, grams)), np.uint64).reshape(-1, 1)
            held = held[len(held) - size + 1 :]
            held += islice(words, SHINGLES)

    def _least(self, shingles: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """(hashes,): the least value of each hash function, as datatrove's `get_signature` computes it."""
        values = shingles * self._factors + self._summands
        values = (values & PRIME) + (values >> np.uint64(61))  # modulo the prime, or larger by one prime
        least: NDArray[np.uint64] = np.minimum(values, values - PRIME).min(axis=0)
        return least

    def signature(self, text: str) -> NDArray[np.uint64]:
        """(buckets,): 64 bits for each bucket, equal where all of its hashes are equal. Among 10^9
        documents without any similar pair, fewer than one pair (0.03 per bucket) is expected to agree by
        accident."""
        hashes = self.hashes(text)
        if hashes is None:
            return np.full(self.buckets, text_hash(text), np.uint64)
        return np.array([_fold(row) for row in hashes.astype("<u8")], np.uint64)


def _fold(row: NDArray[np.uint64]) -> int:
    return int.from_bytes(hashlib.blake2b(row.tobytes(), digest_size=8).digest(), "little")


def first_alike(count: int, buckets: Iterable[NDArray[np.uint64]]) -> NDArray[np.int64]:
    """(count,): for each document the smallest index in its group.

    Two documents are alike when they have the same value in one of the `buckets`, each of shape (count,).
    Memory: 8 bytes per document for the result and 32 for a bucket (its values, their order, and the pairs of
    equal neighbours in it).
    """
    parent = np.arange(count, dtype=np.int64)
    for values in buckets:
        order = np.argsort(values, kind="stable")
        same = values[order[1:]] == values[order[:-1]]
        join(parent, order[:-1][same], order[1:][same])
    return roots_of(parent, np.arange(count, dtype=np.int64))
