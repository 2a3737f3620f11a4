"""One shard of a stream of tokens, read by position: a local or remote `.bin` and its `.idx`.

Invariant: opening reads no token and nothing that grows with their number, and keeps no file open; the pair
is checked when it is first read (`check_index`), and each piece of a stored file by its digest when it is
read. So a stream may have thousands of shards and terabytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from apertus_model.data.megatron import HEADER_BYTES, TokenFileError, check_index, id_outside, read_header
from infra.store.reader import RangeFile


class TokenShard:
    """The tokens of one `.bin`, all documents back to back. Picklable when its files are.

    Args:
        data, index: the two files.
        dtype: type of a token, where it is known; else the header of the index is read for it.
        vocab_size: when given, ids that are read are checked against it.

    Attributes:
        tokens: how many there are.
        remote: whether reading may wait for a network.

    Raises:
        TokenFileError: when header, lengths and counts do not fit together (at the first reading), or an id is outside of the vocabulary.
    """

    def __init__(self, data: RangeFile, index: RangeFile, dtype: np.dtype | None = None, vocab_size: int | None = None) -> None:
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
                f"{self._data.name} holds token id {worst} between tokens {start} and {stop}; the vocabulary has {self._vocab_size}"
            )
        return tokens

    def _check(self) -> None:
        header = check_index(self._index.read, self._index.size, self._data.size, self._index.name, self._data.name)
        if header.dtype != self.dtype:
            raise TokenFileError(f"{self._index.name} has tokens of {header.dtype}; {self.dtype} was expected")
        self._checked = True
