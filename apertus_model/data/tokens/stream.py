"""The tokens of one split of one source: token files (`.bin` and `.idx`), read by position as one stream.

Invariants:
- Opening reads no tokens and nothing that grows with their number, and keeps no file open: it costs the same
  for a kilobyte and a terabyte, in one shard or thousands.
- A pair of files is checked when it is first read (`check_index`), and each block of a stored file when it is
  read, by its digest. Blocks that are copied from a remote store are bounded in number.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from apertus_model.data.tokens.megatron import (
    TokenFileError,
    check_index,
    id_outside,
    sequence_sizes,
    token_dtype,
)
from infra.store import Artifact
from infra.store.files.reader import RangeFile
from infra.store.reading.ranges import BlockCache, StoredFile

IGNORE_INDEX = -100
Split = Literal["train", "validation"]

WHOLE_SPLIT_BYTES = 256 * 2**20
"""Up to this size, a split in a remote store is copied whole, and compared with its digests; a larger one
is read in blocks."""


class Sample(NamedTuple):
    """One sequence of L = `sequence_length` tokens; arrays are (L,)."""

    input: NDArray[np.int64]
    labels: NDArray[np.int64]  # IGNORE_INDEX where nothing is trained
    positions: NDArray[np.int64]  # from 0 in each document
    source: int  # index in the recipe


class TokenShard:
    """The `tokens` tokens of one `.bin`, all documents back to back. Picklable when its files are. `remote`:
    whether reading may wait for a network. Reading raises TokenFileError when header, lengths and counts do
    not fit together, or an id is outside the vocabulary."""

    def __init__(self, data: RangeFile, index: RangeFile, dtype: np.dtype, vocab_size: int) -> None:
        self._data, self._index = data, index
        self._vocab_size = vocab_size
        self._checked = False
        self.remote = data.remote
        self.dtype = dtype
        self.tokens = data.size // dtype.itemsize

    def read(self, start: int, stop: int) -> NDArray[np.integer]:
        """Tokens [start, stop): (stop - start,), `dtype`, read-only."""
        if not self._checked:
            self._check()
        width = self.dtype.itemsize
        tokens: NDArray[Any] = np.frombuffer(self._data.read(start * width, stop * width), self.dtype)
        if (worst := id_outside(tokens, self._vocab_size)) is not None:
            raise TokenFileError(
                f"{self._data.name} holds token id {worst} between tokens {start} and {stop}; the vocabulary"
                f" has {self._vocab_size}"
            )
        return tokens

    def _check(self) -> None:
        header = check_index(
            self._index.read, self._index.size, self._data.size, self._index.name, self._data.name
        )
        if header.dtype != self.dtype:
            raise TokenFileError(
                f"{self._index.name} has tokens of {header.dtype}; {self.dtype} was expected"
            )
        self._checked = True


class TokenStream:
    """The shards of one split of one source, one after the other; each is opened and checked when it is first
    read."""

    def __init__(self, shards: Sequence[TokenShard]) -> None:
        self._shards = list(shards)
        self._starts = list(accumulate((shard.tokens for shard in shards), initial=0))
        self.remote = any(shard.remote for shard in self._shards)

    def __len__(self) -> int:
        """The number of tokens of all files together."""
        return self._starts[-1]

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens [start, stop): (stop - start,), int64."""
        if stop > len(self):
            raise IndexError(f"tokens {start} to {stop} were asked for; the stream has {len(self)}")
        tokens = np.empty(stop - start, dtype=np.int64)
        number, done = bisect_right(self._starts, start) - 1, 0
        while done < tokens.size:
            shard, offset = self._shards[number], self._starts[number]
            piece = shard.read(start + done - offset, min(stop - offset, shard.tokens))
            tokens[done : done + piece.size] = piece
            done += piece.size
            number += 1
        return tokens

    def windows(self, sequence_length: int) -> int:
        """The number of whole windows of `sequence_length` labels."""
        return max(0, (len(self) - 1) // sequence_length)


def document_sizes(corpus: Artifact, shard: str) -> NDArray[np.int32]:
    """(documents,), int32: the tokens of each document of a shard. Of a remote store, only the index is
    copied."""
    data = f"{shard}.bin"
    return sequence_sizes(corpus.local(f"{shard}.idx"), data, corpus.manifest.files[data].size)


def split_shards(corpus: Artifact, split: Split, cache: BlockCache | None = None) -> list[TokenShard]:
    """The shards of a split, for `MixtureSamples.open`. Nothing is read or copied before a shard is used.
    `cache`: for blocks of a large split in a remote store; None copies the split whole."""
    facts, files = corpus.manifest.facts, corpus.manifest.files
    pairs = [(f"{shard}.bin", f"{shard}.idx") for shard in facts[split]]
    small = sum(files[name].size for pair in pairs for name in pair) <= WHOLE_SPLIT_BYTES
    blocks = None if small else cache
    stored = ([StoredFile(corpus, name, blocks) for name in pair] for pair in pairs)
    dtype = token_dtype(facts["vocab_size"])
    return [TokenShard(data, index, dtype, facts["vocab_size"]) for data, index in stored]
