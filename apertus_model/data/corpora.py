"""The files of a corpus artifact, for training and evaluation.

Invariant: opening for training costs the same for a kilobyte and a terabyte; copies from another store are
bounded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from apertus_model.data.megatron import token_dtype
from apertus_model.data.shards import TokenShard
from infra.store import Artifact
from infra.store.ranges import BlockCache, StoredFile

Split = Literal["train", "validation"]

WHOLE_SPLIT_BYTES = 256 * 2**20
"""A split of a store elsewhere is copied whole, and checked by its digests, up to this size; a larger one is read in blocks."""


def split_files(corpus: Artifact, split: Split) -> list[tuple[Path, Path]]:
    """Local `.bin` and `.idx` of each shard of a split, in order, content checked."""
    shards = corpus.manifest["facts"][split]
    return [(corpus.local(f"{shard}.bin"), corpus.local(f"{shard}.idx")) for shard in shards]


def split_shards(corpus: Artifact, split: Split, cache: BlockCache | None = None) -> list[TokenShard]:
    """The shards of a split for reading windows, for `MixtureSamples.open`: nothing is read or copied before
    a shard is used.

    Args:
        corpus: the artifact.
        split: which.
        cache: for blocks of a large split in another store; None copies it whole.
    """
    facts, files = corpus.manifest["facts"], corpus.manifest["files"]
    pairs = [(f"{shard}.bin", f"{shard}.idx") for shard in facts[split]]
    small = sum(files[name]["size"] for pair in pairs for name in pair) <= WHOLE_SPLIT_BYTES
    blocks = None if small else cache
    vocab_size = facts["vocab_size"]
    return [
        TokenShard(StoredFile(corpus, data, blocks), StoredFile(corpus, index, blocks), token_dtype(vocab_size), vocab_size)
        for data, index in pairs
    ]
