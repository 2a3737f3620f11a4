"""How often each item of a source is seen in an epoch, where a source is repeated any number of times.

Invariant: of n items that are repeated r times, an epoch has exactly round(n r) (halves up, r the decimal
number as it is written): each item floor(r) times, and a part of them once more. The parts of successive
epochs follow one another in a permutation that the seed decides, round and round, so each item is seen as
often as any other, or once more.
"""

from __future__ import annotations

import functools
from fractions import Fraction
from math import floor

import numpy as np
from numpy.typing import NDArray

from apertus_model.data.permutation import KeyedPermutation

permutation = functools.lru_cache(maxsize=16)(KeyedPermutation)


def times_seen(items: int, repeats: Fraction, *, seed: int, source: int, epoch: int) -> NDArray[np.int64]:
    """(items,), int64: how often each is seen in an epoch. `source`: number of the source among those that
    share the seed."""
    counts = np.full(items, floor(repeats))
    once_more = floor(items * repeats + Fraction(1, 2)) - items * floor(repeats)
    if once_more:  # never without items
        places = (epoch * once_more + np.arange(once_more)) % items
        counts[permutation(items, seed, "part", source).array(places)] += 1
    return counts
