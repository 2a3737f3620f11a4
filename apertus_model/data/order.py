"""Which source, and which window of it, sample i of a mixture is.

Invariants:
- The answer is a pure function of (weights, windows, seed, i); its cost does not grow with i, with the number of windows or of samples,
  and nothing is built at the start. Weights are exact: no float takes part.
- Sample order is cut into blocks of `block` samples, the smallest power of two with block * share >= 1 for every
  source; so none is missing from two blocks in a row.
  At a border after n samples, source j with share w_j has been drawn floor(n * (w_1 + ... + w_j)) - floor(n * (w_1 + ... + w_{j-1}))
  times: within 1 of n * w_j, for ever. Inside a block its own keyed permutation spreads the sources, and the count stays within
  `MixtureOrder.discrepancy(j)` = 1 + 2 w_j + block * w_j * (1 - w_j) of n * w_j.
- Within a source the k-th draw is window `permutation_{seed, source, epoch}(k mod windows)`, epoch = k // windows: no window is seen an
  (e+1)-th time before the block in which all have been seen e times.
- Sources are known by their position only, never by a name.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from math import lcm
from typing import NamedTuple

from apertus_model.data.permutation import KeyedPermutation

# Samples are read more or less in order, from one block and one epoch of each source at a time: few keys are in use at once.
_permutation = functools.lru_cache(maxsize=1024)(KeyedPermutation)


class Draw(NamedTuple):
    """Where one sample comes from: `draw` counts the samples of this source from 0 without end, `window` = its place in the source."""

    source: int
    draw: int
    epoch: int
    window: int


class MixtureOrder:
    """The order of a mixture.

    Args:
        weights: one positive exact number per source; only their ratios matter.
        windows: how many windows each source has.
        seed: any integer.

    Raises:
        ValueError: for no sources, lists of different lengths, a weight or a number of windows that is not positive.
    """

    def __init__(self, weights: Sequence[int | Fraction], windows: Sequence[int], seed: int) -> None:
        if not weights or len(weights) != len(windows):
            raise ValueError(f"a mixture needs one weight and one number of windows per source, not {len(weights)} and {len(windows)}")
        for source, (weight, count) in enumerate(zip(weights, windows, strict=True)):
            if weight <= 0:
                raise ValueError(f"source {source} has weight {weight}; leave a source out instead of weighting it 0")
            if count < 1:
                raise ValueError(f"source {source} has {count} windows; it needs one at least")
        exact = [Fraction(weight) for weight in weights]
        scale = lcm(*(weight.denominator for weight in exact))
        integers = [int(weight * scale) for weight in exact]
        self.windows = tuple(windows)
        self.seed = seed
        self._total = sum(integers)
        self._cumulative = tuple(accumulate(integers, initial=0))
        self.shares = tuple(Fraction(weight, self._total) for weight in integers)
        self.block = 1 << (-(-self._total // min(integers)) - 1).bit_length()

    def __getitem__(self, i: int) -> Draw:
        """Sample i, i >= 0. Raises IndexError for a negative one."""
        if i < 0:
            raise IndexError(f"sample {i}: samples are counted from 0")
        block, offset = divmod(i, self.block)
        place = _permutation(self.block, self.seed, "block", block)(offset)
        before = after = self._up_to(block, 0)
        for source in range(len(self.windows)):
            before, after = after, self._up_to(block, source + 1)
            if place < after[1] - after[0]:
                break
        draw = after[0] - before[0] + place - (before[1] - before[0])
        epoch, index = divmod(draw, self.windows[source])
        windows = _permutation(self.windows[source], self.seed, "source", source, epoch)
        return Draw(source, draw, epoch, windows(index))

    def drawn(self, n: int) -> list[int]:
        """How many of the first n samples come from each source. Costs one block at most."""
        block, rest = divmod(n, self.block)
        starts = [self._up_to(block, source)[0] for source in range(len(self.windows) + 1)]
        counts = [end - start for start, end in pairwise(starts)]
        for i in range(n - rest, n):
            counts[self[i].source] += 1
        return counts

    def discrepancy(self, source: int) -> Fraction:
        """Upper bound on |drawn(n)[source] - n * shares[source]| over all n; at multiples of `block` it is below 1."""
        share = self.shares[source]
        return 1 + 2 * share + self.block * share * (1 - share)

    def _up_to(self, block: int, sources: int) -> tuple[int, int]:
        """Samples of the first `sources` sources before block `block`, and before the one after it."""
        weight = self._cumulative[sources]
        return block * self.block * weight // self._total, (block + 1) * self.block * weight // self._total
