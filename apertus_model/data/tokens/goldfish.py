"""The labels that the Goldfish loss leaves out (arXiv 2406.10209, in the form that the Apertus runs used).

Invariant: the decision is a function of the label ids alone, so the same text is masked in the same places
whenever it is seen. The decision equals the published one bit for bit:

    drop label i  <=>  u[(l[i-h+1] * ... * l[i] mod 2^64, as a signed integer) floor-mod TABLE_SIZE] < 1/k

with u the first TABLE_SIZE floats of torch's CPU generator at `TABLE_SEED`. torch is not needed for them:
such a float is the low 24 bits of a Mersenne Twister draw divided by 2^24, and numpy's legacy generator is
seeded and stepped the same way.
"""

import functools

import numpy as np
from numpy.typing import ArrayLike, NDArray

TABLE_SIZE = 1_000_003
TABLE_SEED = 2_971_215_073


@functools.cache
def hash_table() -> NDArray[np.uint32]:
    """The table as integers: (TABLE_SIZE,), uint32; entry / 2**24 is the uniform float of the reference."""
    draws = np.random.RandomState(TABLE_SEED).randint(0, 2**32, size=TABLE_SIZE, dtype=np.uint32)
    return draws & np.uint32(2**24 - 1)


@functools.cache
def _dropping(k: int) -> NDArray[np.bool_]:
    """(TABLE_SIZE,), bool: whether a window with this hash loses its last label, exactly `u < 1/k`."""
    return hash_table().astype(np.int64) * k < 2**24


def window_products(values: NDArray[np.int64], h: int) -> NDArray[np.int64]:
    """Products of h consecutive values along the last axis, wrapping around in 64 bits: (..., n) -> (..., n -
    h + 1). Products of 1, 2, 4, ... values make h = 50 = 32 + 16 + 2 cost 7 multiplications."""
    length = values.shape[-1] - h + 1
    power, width, start = values, 1, 0
    product = None
    remaining = h
    while True:
        if remaining & 1:
            factor = power[..., start : start + length]
            product = factor if product is None else product * factor
            start += width
        remaining >>= 1
        if not remaining:
            assert product is not None, "h is at least 1"
            return product
        power = power[..., :-width] * power[..., width:]
        width *= 2


def goldfish_mask(
    labels: ArrayLike, k: int, h: int, positions: NDArray[np.int64] | None = None
) -> NDArray[np.bool_]:
    """True where the loss leaves a label out.

    Args:
        labels: true token ids (none replaced by -100), (seq_len,) or (batch, seq_len).
        k: about one label in k is dropped.
        h: number of labels that decide, the dropped one included. The first h - 1 labels of each row are
            never dropped.
        positions: position, within its document, of the input before each label, from 0; shape of `labels`.
            With them, the first h - 1 labels of each document are never dropped.
    """
    values = np.asarray(labels).astype(np.int64, copy=False)
    mask = np.zeros(values.shape, dtype=np.bool_)
    if values.shape[-1] >= h:
        products = window_products(values, h)
        places = products // TABLE_SIZE  # the floor-mod without `%`, in place, is faster
        places *= -TABLE_SIZE
        places += products
        _dropping(k).take(places, out=mask[..., h - 1 :], mode="clip")  # "raise" would copy
    if positions is not None:
        mask &= positions >= h - 1
    return mask
