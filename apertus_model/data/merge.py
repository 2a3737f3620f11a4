"""From the token files of tasks to the splits of a corpus: hold-out, memorisation probes, shuffle.

Invariants:
- The result is a function of the *set* of documents, of the spec and of the seed: documents are first sorted
  by content hash, so neither the split into tasks nor the names of the files matter.
- A document is held out by its content hash alone: the same text is held out of every corpus with that share,
  and copies of one document are in the same split.
- The shuffle is over documents; tokens within one stay together.

One process, and memory by the number of documents, not of tokens: 24 bytes per document are held, 86 at the
peak while the order is made (measured), beside the 47 of `apertus_model.data.selection`: 133 GB for 10^9
documents of one source; split larger sources. Probes hold the beginnings of their source's documents as well.
Tokens are read by random access, in shuffled order, from the memory-mapped files of the tasks, which stay
open: tasks are limited by the open files of a process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apertus_model.data.megatron import TokenFile, TokenFileWriter, token_dtype
from apertus_model.data.permutation import KeyedPermutation
from infra.store.inputs import SourceError
from specs.stages.corpus import Repeats

SHARD_TOKENS = 2**31


@dataclass(frozen=True)
class Documents:
    """All documents of a corpus, sorted by content hash."""

    files: list[TokenFile]  # one per task
    file: NDArray[np.int32]  # (documents,): index in `files` of the file that has the document
    index: NDArray[np.int64]  # (documents,): index of the document in that file
    hashes: NDArray[np.uint64]  # (documents,): content hashes
    sizes: NDArray[np.int32]  # (documents,): lengths in tokens

    @classmethod
    def open(cls, tasks: Sequence[tuple[TokenFile, NDArray[np.uint64], NDArray[np.bool_]]]) -> Documents:
        """Opens the documents of the tasks.

        Args:
            tasks: at least one; for each its token file, the hashes of its documents, and whether each of
                them is wanted.

        Raises:
            ValueError: a file and its hashes differ in length.
        """
        for tokens, hashes, wanted in tasks:
            if not len(tokens) == len(hashes) == len(wanted):
                raise ValueError(
                    f"{tokens.path} has {len(tokens)} documents, but there are {len(hashes)} hashes of them"
                )
        hashes = np.concatenate([hashes[wanted] for _, hashes, wanted in tasks])
        order = np.argsort(hashes, kind="stable")
        file = np.concatenate(
            [np.full(wanted.sum(), number, np.int32) for number, (_, _, wanted) in enumerate(tasks)]
        )
        index = np.concatenate([np.flatnonzero(wanted) for _, _, wanted in tasks])
        sizes = np.concatenate([tokens.sizes[wanted] for tokens, _, wanted in tasks])
        return cls([tokens for tokens, _, _ in tasks], file[order], index[order], hashes[order], sizes[order])

    def __len__(self) -> int:
        return len(self.hashes)

    def tokens(self, document: int) -> NDArray[np.integer]:
        """(size,) ids, from begin- to end-of-document token."""
        return self.files[self.file[document]][int(self.index[document])]

    def held_out(self, share: float) -> NDArray[np.bool_]:
        """(documents,): whether a document is held out. SourceError when one of the two splits would be
        empty."""
        mask = self.hashes < np.uint64(min(int(share * 2**64), 2**64 - 1))
        count = int(mask.sum())
        if 0 < count < len(self):
            return mask
        if len(self) < 2:
            raise SourceError(
                f"{len(self)} documents are left after filtering; training and held-out split need one each"
            )
        if count:
            raise SourceError(
                f"holdout {share} holds out all {len(self)} documents. Fix: a smaller share or more documents"
            )
        least = (int(self.hashes[0]) + 1) / 2**64
        raise SourceError(
            f"holdout {share} of {len(self)} documents holds out none of them. Fix: more documents, or a"
            f" share of {least:.4f} or more"
        )


@dataclass(frozen=True)
class Probe:
    """A sequence that the training split repeats."""

    document: int | None  # index of the document that it is cut from; None for a planted one
    bucket: int  # number of repetitions
    token_ids: NDArray[np.integer]  # (length,)


def choose_probes(documents: Documents, train: NDArray[np.int64], repeats: Repeats, seed: int) -> list[Probe]:
    """Chooses `per_bucket` training documents for each bucket and cuts their first `length` tokens.

    Documents that share the first half of those tokens with another one (licence headers, templates) are not
    candidates, since training sees their continuation more often than stated.

    Args:
        documents: all documents of the corpus.
        train: indices of the documents of the training split.
        repeats: buckets, number of probes in each, and their length.
        seed: of the choice.

    Raises:
        SourceError: when there are too few long documents.
    """
    needed = len(repeats.buckets) * repeats.per_bucket
    openings: dict[bytes, int] = {}
    half = repeats.length // 2
    for document in range(len(documents)):
        if documents.sizes[document] > half:
            opening = documents.tokens(document)[:half].tobytes()
            openings[opening] = openings.get(opening, 0) + 1
    candidates = [
        int(document)
        for document in train
        if documents.sizes[document] > repeats.length
        and openings[documents.tokens(document)[:half].tobytes()] == 1
    ]
    if len(candidates) < needed:
        raise SourceError(
            f"{len(repeats.buckets)} buckets of {repeats.per_bucket} probes need {needed} training documents"
            f" of more than {repeats.length} tokens that begin differently; there are {len(candidates)}. Fix:"
            " fewer or shorter probes, or more documents"
        )
    order = KeyedPermutation(len(candidates), seed, "probes")
    chosen = [candidates[order(position)] for position in range(needed)]
    return [
        Probe(
            document,
            repeats.buckets[position // repeats.per_bucket],
            documents.tokens(document)[: repeats.length],
        )
        for position, document in enumerate(chosen)
    ]


@dataclass(frozen=True)
class Split:
    """One written split."""

    shards: list[str]  # file names without suffix
    documents: int
    tokens: int


class SplitWriter:
    """Writes the documents of one split, shuffled, in shards of about `shard_tokens` tokens."""

    def __init__(self, folder: Path, vocab_size: int, seed: int, shard_tokens: int = SHARD_TOKENS) -> None:
        self._folder = folder
        self._dtype = token_dtype(vocab_size)
        self._seed = seed
        self._shard_tokens = shard_tokens

    def write(
        self,
        name: str,
        documents: Documents,
        chosen: NDArray[np.int64],
        probes: Sequence[Probe] = (),
        eos_id: int = 0,
    ) -> Split:
        """Writes the `chosen` documents, and each probe `bucket` times, followed by an end-of-document
        token."""
        copies = [probe for probe in probes for _ in range(probe.bucket)]
        total = len(chosen) + len(copies)
        order = KeyedPermutation(total, self._seed, name).array(np.arange(total))
        shards: list[str] = []
        tokens = position = 0
        while position < total:
            shards.append(f"{name}-{len(shards):05d}")
            with TokenFileWriter(self._folder / shards[-1], self._dtype) as writer:
                written = 0
                while position < total and written < self._shard_tokens:
                    place = int(order[position])
                    if place < len(chosen):
                        ids = documents.tokens(int(chosen[place]))
                    else:
                        ids = np.append(copies[place - len(chosen)].token_ids, eos_id)
                    writer.write(ids)
                    written += ids.size
                    position += 1
            tokens += written
        return Split(shards, total, tokens)


def probes_json(probes: Sequence[Probe], length: int) -> dict[str, Any]:
    """The content of probes.json: `{"length", "probes": [{"bucket", "token_ids"}]}`."""
    return {
        "length": length,
        "probes": [{"bucket": probe.bucket, "token_ids": probe.token_ids.tolist()} for probe in probes],
    }
