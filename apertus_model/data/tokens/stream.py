"""The tokens of one split of one source: token files (`.bin` and `.idx`), read by position as one stream.

Invariants:
- Opening reads no tokens and nothing that grows with their number, and keeps no file open: it costs the same
  for a kilobyte and a terabyte, in one shard or thousands.
- A pair of files is checked when it is first read (`check_index`), and each block of a stored file when it is
  read, by its digest. Blocks that are copied from a remote store are bounded in number.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from apertus_model.data.tokens.megatron import (
    HEADER_BYTES,
    TokenFileError,
    check_index,
    id_outside,
    read_header,
    token_dtype,
)
from infra.store import Artifact
from infra.store.files.reader import RangeFile
from infra.store.reading.ranges import BlockCache, LocalFile, StoredFile

IGNORE_INDEX = -100
TokenPath = Path | str | tuple[Path, Path]
"""A token file: the common path of `.bin` and `.idx` without suffix, or the two paths."""
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
    """The `tokens` tokens of one `.bin`, all documents back to back. Picklable when its files are. `dtype`:
    type of a token; None reads it from the index. Ids that are read are compared with `vocab_size`, if it is
    given. `remote`: whether reading may wait for a network. Reading raises TokenFileError when header,
    lengths and counts do not fit together, or an id is outside the vocabulary."""

    def __init__(
        self, data: RangeFile, index: RangeFile, dtype: np.dtype | None = None, vocab_size: int | None = None
    ) -> None:
        self._data, self._index = data, index
        self._vocab_size = vocab_size
        self._checked = False
        self.remote = data.remote
        self.dtype = dtype or read_header(index.read(0, min(HEADER_BYTES, index.size)), index.name).dtype
        self.tokens = data.size // self.dtype.itemsize

    def read(self, start: int, stop: int) -> NDArray[np.integer]:
        """Tokens [start, stop): (stop - start,), `dtype`, read-only."""
        if not self._checked:
            self._check()
        width = self.dtype.itemsize
        tokens: NDArray[Any] = np.frombuffer(self._data.read(start * width, stop * width), self.dtype)
        if self._vocab_size is not None and (worst := id_outside(tokens, self._vocab_size)) is not None:
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


TokenPaths = TokenPath | list[tuple[Path, Path]] | list[Path] | list[TokenPath] | list[TokenShard]


class TokenStream:
    """The token files of one split of one source, one after the other; each is opened and checked when it is
    first read. ValueError without files, FileNotFoundError for a missing file, and what TokenShard raises."""

    def __init__(self, paths: TokenPaths, vocab_size: int | None = None) -> None:
        self._shards: list[TokenShard] = []
        for path in paths if isinstance(paths, list) else [paths]:
            # The shards of a split have tokens of one type, which the header of the first states.
            dtype = self._shards[0].dtype if self._shards else None
            self._shards.append(
                path if isinstance(path, TokenShard) else TokenShard(*_files(path), dtype, vocab_size)
            )
        if not self._shards:
            raise ValueError("a token stream needs at least one token file")
        self._starts = list(accumulate((shard.tokens for shard in self._shards), initial=0))
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


def _files(path: TokenPath) -> tuple[LocalFile, LocalFile]:
    """The `.bin` and the `.idx` of a token file."""
    if isinstance(path, tuple):
        return LocalFile(path[0]), LocalFile(path[1])
    prefix = str(path).removesuffix(".bin")
    return LocalFile(f"{prefix}.bin"), LocalFile(f"{prefix}.idx")


def split_files(corpus: Artifact, split: Split) -> list[tuple[Path, Path]]:
    """The local `.bin` and `.idx` of each shard of a split, in order, with checked content."""
    shards = corpus.manifest.facts[split]
    return [(corpus.local(f"{shard}.bin"), corpus.local(f"{shard}.idx")) for shard in shards]


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
