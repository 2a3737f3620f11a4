"""The number of times that an epoch shows each item of a source that is repeated any number of times.

Invariant: of n items with r repeats, an epoch shows exactly round(n r) (halves up, r the decimal number as it
is written): each item floor(r) times, and some of them once more. Successive epochs take the items to show
once more in turn from a permutation that the seed decides, and start over at its end, so that the counts of
two items never differ by more than one.
"""

from __future__ import annotations

import functools
from fractions import Fraction
from math import floor

import numpy as np
from numpy.typing import NDArray

from apertus_model.data.order.permutation import KeyedPermutation

permutation = functools.lru_cache(maxsize=16)(KeyedPermutation)


def times_seen(items: int, repeats: Fraction, *, seed: int, source: int, epoch: int) -> NDArray[np.int64]:
    """The number of times that each item is seen in an epoch: (items,), int64. `source`: number of the source
    among those that share the seed."""
    counts = np.full(items, floor(repeats))
    once_more = floor(items * repeats + Fraction(1, 2)) - items * floor(repeats)
    if once_more:  # never true if there are no items
        places = (epoch * once_more + np.arange(once_more)) % items
        counts[permutation(items, seed, "part", source).array(places)] += 1
    return counts
