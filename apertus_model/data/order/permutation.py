"""A keyed permutation of `range(n)` without memory, and how often an epoch shows each item of a repeated
source.

Invariants:
- `KeyedPermutation(n, *key)` is a bijection of `range(n)`, the same on every machine and in every process.
- Nothing that grows with `n` is built: a value costs a little over one pass of `ROUNDS` mixings on average.
- Of n items with r repeats, an epoch shows exactly round(n r) (halves up, r the decimal number as it is
  written): each item floor(r) times, and some of them once more. Successive epochs take the items to show
  once more in turn from a permutation that the seed decides, and start over at its end, so that the counts of
  two items never differ by more than one.

The domain is arranged as a rectangle of `rows x columns >= n` cells with both sides near the square root of
n. A round adds to one coordinate a hash of the other (a Feistel network with modular addition, Black &
Rogaway 2002, "Ciphers with arbitrary finite domains"); a value that lands in one of the fewer than `rows`
surplus cells is sent through again (cycle walking).
"""

import functools
import hashlib
import json
import math
import struct
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8
MAX_SIZE = 2**48
_MASK = 2**64 - 1


def _mix(value: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea & Flood 2014), a bijection that spreads every bit."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def mix_array(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


class KeyedPermutation:
    """The permutation of `range(n)` that belongs to `key`, a tuple of integers and strings (`(seed,
    "documents")`). ValueError unless 1 <= n <= 2**48."""

    def __init__(self, n: int, *key: int | str) -> None:
        if not 1 <= n <= MAX_SIZE:
            raise ValueError(f"a permutation of {n} items was asked for; between 1 and 2**48 are possible")
        self.n = n
        self._rows = math.isqrt(n - 1) + 1
        self._columns = -(-n // self._rows)
        # JSON keeps (1, "2") and ("1", 2) and ("12",) apart.
        digest = hashlib.blake2b(
            json.dumps(key).encode(), digest_size=8 * ROUNDS, person=b"apertus-permute"
        ).digest()
        self._keys: tuple[int, ...] = struct.unpack(f"<{ROUNDS}Q", digest)

    def __call__(self, index: int) -> int:
        """The image of `index`. Raises IndexError outside of `range(n)`."""
        if not 0 <= index < self.n:
            raise IndexError(f"index {index} is outside of a permutation of {self.n} items")
        value = index
        while True:
            column, row = divmod(value, self._rows)
            for number, key in enumerate(self._keys):
                if number % 2:
                    column = (column + _mix(row ^ key)) % self._columns
                else:
                    row = (row + _mix(column ^ key)) % self._rows
            value = column * self._rows + row
            if value < self.n:
                return value

    def array(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """The images of many indices, of any shape. Raises IndexError like a call."""
        if indices.size and not (int(indices.min()) >= 0 and int(indices.max()) < self.n):
            raise IndexError(
                f"indices from {indices.min()} to {indices.max()} are outside of a permutation of {self.n}"
                " items"
            )
        values = indices.astype(np.uint64).ravel()
        rows, columns = np.uint64(self._rows), np.uint64(self._columns)
        pending = np.arange(values.size)
        while pending.size:
            column, row = np.divmod(values[pending], rows)
            for number, key in enumerate(np.array(self._keys, dtype=np.uint64)):
                # Reduced before the addition: an unsigned sum of 64 bits would wrap around, a Python integer
                # does not.
                if number % 2:
                    column = (column + mix_array(row ^ key) % columns) % columns
                else:
                    row = (row + mix_array(column ^ key) % rows) % rows
            values[pending] = column * rows + row
            pending = pending[values[pending] >= self.n]
        return values.astype(np.int64).reshape(indices.shape)


cached_permutation = functools.lru_cache(maxsize=16)(KeyedPermutation)


def times_seen(items: int, repeats: Fraction, *, seed: int, source: int, epoch: int) -> NDArray[np.int64]:
    """(items,), int64: how often an epoch shows each item. `source`: number among those of the seed."""
    counts = np.full(items, math.floor(repeats))
    once_more = math.floor(items * repeats + Fraction(1, 2)) - items * math.floor(repeats)
    if once_more:  # never true if there are no items
        places = (epoch * once_more + np.arange(once_more)) % items
        counts[cached_permutation(items, seed, "part", source).array(places)] += 1
    return counts
