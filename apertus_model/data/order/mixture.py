"""The source and window of sample i of a mixture.

Invariants:
- The answer is a pure function of (weights, windows, seed, keys of the sources, i). Its cost grows with the
  number of sources of a mixture, and not with i, the number of windows, shards or samples; nothing is built
  at the start. Weights are exact: no floats are used.
- Samples are apportioned by halving: of n samples, a group of sources gets the rounded n * (share of its
  first half), the second half gets the rest, and so on inside each. So a count never falls as n grows, and is
  within `border_error(j)` of n * w_j, at most half a sample for each halving.
- Sample order is cut into blocks of BLOCK samples, whose borders have exactly those counts; inside a block a
  keyed order spreads the sources. At any n the count of a source is within `discrepancy(j)` = BLOCK * w_j *
  (1 - w_j) + border_error(j) * (1 + 2 max(w_j, 1 - w_j)) of n * w_j: about 32 samples at most, for ever. Over
  any 100,000 consecutive samples a share is thus within 0.1% of the requested one.
- The first n samples draw the first drawn(n)[j] samples of source j, for every n: no gaps.
- Draw k of a source is window `permutation_{seed, key, epoch}((start + k) mod windows)`, epoch = (start + k)
  // windows: no window is seen an (e+1)-th time before all have been seen e times. `start` counts the draws
  that were made elsewhere, in the same order, and that are skipped here.
"""

import functools
import hashlib
import json
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from math import lcm
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from apertus_model.data.order.permutation import KeyedPermutation, mix_array

BLOCK = 128

# Samples are read more or less in order, from one block and one epoch of each source at a time: few keys are
# in use at once.
_permutation = functools.lru_cache(maxsize=1024)(KeyedPermutation)


class Draw(NamedTuple):
    """The origin of one sample."""

    source: int
    draw: int  # index among the samples that the mixture draws from this source, from 0 without end
    epoch: int  # pass over the source
    window: int  # index of the window in the source


class MixtureOrder:
    """The order of a mixture, by one positive weight per source, of which only the ratios matter, and one
    number of windows. The order of a source's windows depends on the seed and its key alone (by default its
    position); `starts`: numbers of draws that the sources skip."""

    def __init__(
        self,
        weights: Sequence[int | Fraction],
        windows: Sequence[int],
        seed: int,
        *,
        keys: Sequence[str | int] | None = None,
        starts: Sequence[int] | None = None,
    ) -> None:
        assert min(weights) > 0 and min(windows) > 0, "recipes have sources of these"
        exact = [Fraction(weight) for weight in weights]
        scale = lcm(*(weight.denominator for weight in exact))
        whole = [int(weight * scale) for weight in exact]
        self.windows = tuple(windows)
        self.seed = seed
        self.keys = tuple(range(len(whole)) if keys is None else keys)
        self.starts = tuple([0] * len(whole) if starts is None else starts)
        assert len(self.keys) == len(self.starts) == len(windows) == len(whole) and min(self.starts) >= 0
        self._cumulative = tuple(accumulate(whole, initial=0))
        self.shares = tuple(Fraction(weight, self._cumulative[-1]) for weight in whole)
        self._whole = tuple(whole)
        self._block = functools.lru_cache(maxsize=64)(self._make_block)

    def __reduce__(self) -> tuple[Any, ...]:
        order = functools.partial(MixtureOrder, keys=self.keys, starts=self.starts)
        return order, (self._whole, self.windows, self.seed)

    def __getitem__(self, i: int) -> Draw:
        """The origin of sample i, i >= 0. Raises IndexError for a negative index."""
        if i < 0:
            raise IndexError(f"sample {i}: samples are counted from 0")
        block, offset = divmod(i, BLOCK)
        sources, draws = self._block(block)
        return self.draw(sources[offset], draws[offset])

    def draw(self, source: int, draw: int) -> Draw:
        """Draw number `draw` of a source, counted from 0."""
        windows = self.windows[source]
        epoch, index = divmod(self.starts[source] + draw, windows)
        return Draw(
            source, draw, epoch, _permutation(windows, self.seed, "windows", self.keys[source], epoch)(index)
        )

    def drawn(self, n: int) -> list[int]:
        """The number of the first n samples that come from each source."""
        block, rest = divmod(n, BLOCK)
        counts = self._at(block * BLOCK)
        for source in self._block(block)[0][:rest]:
            counts[source] += 1
        return counts

    def border_error(self, source: int) -> Fraction:
        """Upper bound on |drawn(n)[source] - n * shares[source]| at multiples of BLOCK."""
        error = Fraction(0)
        low, high = 0, len(self.windows)
        while high - low > 1:
            middle = (low + high) // 2
            inner = (low, middle) if source < middle else (middle, high)
            error = error * Fraction(self._weight(*inner), self._weight(low, high)) + Fraction(1, 2)
            low, high = inner
        return error

    def discrepancy(self, source: int) -> Fraction:
        """Upper bound on |drawn(n)[source] - n * shares[source]|; over samples a to b, twice that."""
        share, error = self.shares[source], self.border_error(source)
        return BLOCK * share * (1 - share) + error * (1 + 2 * max(share, 1 - share))

    def _weight(self, low: int, high: int) -> int:
        return self._cumulative[high] - self._cumulative[low]

    def _at(self, n: int) -> list[int]:
        """The number of the first n samples that come from each source, for a border n between blocks."""
        counts = [0] * len(self.windows)
        groups = [(0, len(counts), n)]
        while groups:
            low, high, count = groups.pop()
            if high - low == 1:
                counts[low] = count
            elif count:
                middle = (low + high) // 2
                total = self._weight(low, high)
                first = (2 * count * self._weight(low, middle) + total) // (2 * total)
                groups += [(low, middle, first), (middle, high, count - first)]
        return counts

    def _make_block(self, block: int) -> tuple[list[int], list[int]]:
        """The source and the draw of each of the BLOCK samples of a block."""
        before, after = self._at(block * BLOCK), self._at((block + 1) * BLOCK)
        counts = [end - start for start, end in zip(before, after, strict=True)]
        sources = np.repeat(np.arange(len(counts)), counts)[_shuffled(self.seed, block)]
        draws = np.empty(BLOCK, dtype=np.int64)
        ranges = [np.arange(start, end) for start, end in zip(before, after, strict=True) if end > start]
        draws[np.argsort(sources, kind="stable")] = np.concatenate(ranges)
        return sources.tolist(), draws.tolist()


def _shuffled(seed: int, block: int) -> NDArray[np.int64]:
    """The numbers below BLOCK in the keyed order of a block: (BLOCK,), int64."""
    digest = hashlib.blake2b(json.dumps([seed, block]).encode(), digest_size=8, person=b"apertus-mixture")
    start = np.uint64(int.from_bytes(digest.digest(), "little"))
    keys = np.arange(1, BLOCK + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + start
    return np.argsort(mix_array(keys), kind="stable")
