"""The tokens of one split of one source, and samples of them.

Invariant: a file is opened and checked when a token of it is first read, not before.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from apertus_model.data.shards import TokenShard
from infra.store.ranges import LocalFile

IGNORED = -100
TokenPath = Path | str | tuple[Path, Path]
"""A token file: the common path of `.bin` and `.idx` without suffix, or the two paths."""
TokenPaths = TokenPath | list[tuple[Path, Path]] | list[Path] | list[TokenPath] | list[TokenShard]


class Sample(NamedTuple):
    """One sequence of `L = sequence_length` tokens."""

    input: NDArray[np.int64]  # (L,)
    labels: NDArray[np.int64]  # (L,), IGNORED where nothing is trained
    positions: NDArray[np.int64]  # (L,), from 0 in each document
    source: int  # its index in the recipe


class TokenStream:
    """The token files of one split of one source, one after the other; each is opened and checked when it is first read.

    Raises ValueError without files, FileNotFoundError for one that is missing, and what TokenShard raises.
    """

    def __init__(self, paths: TokenPaths, vocab_size: int | None = None) -> None:
        self._shards: list[TokenShard] = []
        for path in paths if isinstance(paths, list) else [paths]:
            # The shards of a split have tokens of one type: the header of the first tells it.
            dtype = self._shards[0].dtype if self._shards else None
            self._shards.append(path if isinstance(path, TokenShard) else TokenShard(*_files(path), dtype, vocab_size))
        if not self._shards:
            raise ValueError("a token stream needs at least one token file")
        self._starts = list(accumulate((shard.tokens for shard in self._shards), initial=0))
        self.remote = any(shard.remote for shard in self._shards)

    def __len__(self) -> int:
        """Tokens of all files together."""
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
        """How many whole windows of `sequence_length` labels there are."""
        return max(0, (len(self) - 1) // sequence_length)


class Sequences(Protocol):
    """The training sequences of one source."""

    def __len__(self) -> int: ...

    def sample(self, index: int, source: int) -> Sample:
        """Sequence `index` as a sample of source number `source`."""


def _files(path: TokenPath) -> tuple[LocalFile, LocalFile]:
    """The `.bin` and the `.idx`."""
    if isinstance(path, tuple):
        return LocalFile(path[0]), LocalFile(path[1])
    prefix = str(path).removesuffix(".bin")
    return LocalFile(f"{prefix}.bin"), LocalFile(f"{prefix}.idx")
