"""Counts the labels left out by the hash of the Goldfish loss: fewer than one in k, since many ids are even.

Invariant: the planner does not import this module, which takes the hash's table with numpy from
`apertus_model.data.tokens.goldfish`; code that shows a plan passes `masked_by_hash` to it.
"""

import functools

import numpy as np

from apertus_model.data.tokens.goldfish import TABLE_SIZE, hash_table
from specs.settings import Goldfish
from specs.stages.training import Segment

FEW_VALUES = 44  # factors of two from which hash values are counted one by one; with 44 there are 2^19


def masked_by_hash(segment: Segment, tokens: int) -> int:
    """The number of labels, of `tokens` labels, that the hash leaves out if ids are uniform."""
    if segment.goldfish is None:
        return 0
    return round(tokens * masked_share(segment.goldfish, segment.sequence_length, segment.model.vocab_size))


def masked_share(goldfish: Goldfish, sequence_length: int, vocab_size: int) -> float:
    """The share of the labels that the Goldfish hash leaves out, for token ids that are uniform in
    [0, vocab_size). The first h - 1 labels of a sequence always stay."""
    windows = max(0, sequence_length - goldfish.h + 1)
    return _of_windows(goldfish.k, goldfish.h, vocab_size) * windows / sequence_length


@functools.cache
def _of_windows(k: int, h: int, vocab_size: int) -> float:
    """The share of windows of h ids whose last label is left out.

    A window's hash is the product of its h ids modulo 2^64. If the ids have v factors of two in total, it is
    2^v times one of 2^(63-v) odd numbers; so for many even ids the hash takes few values, and the share
    depends on the table's entries for these alone (a single entry for 0). With few factors of two, hashes
    are spread evenly over the table.
    """
    twos = np.zeros(65)  # probability for one id, by number of factors of two; 64: 64 or more
    divisible = [(vocab_size - 1) >> v for v in range(65)]  # number of ids from 1 on that 2^v divides
    twos[:64] = [(divisible[v] - divisible[v + 1]) / vocab_size for v in range(64)]
    twos[64] = 1 / vocab_size  # id 0
    total = np.zeros(65)
    total[0] = 1.0
    for _ in range(h):
        both = np.convolve(total, twos)
        total = np.append(both[:64], both[64:].sum())
    dropping = hash_table().astype(np.int64) * k < 2**24
    share = float(total[64]) * bool(dropping[0])
    for v in range(64):
        if v < FEW_VALUES:
            dropped = dropping.mean()
        else:
            odd = np.arange(1, 2 ** (64 - v), 2, dtype=np.uint64)
            dropped = dropping[(odd << np.uint64(v)).astype(np.int64) % TABLE_SIZE].mean()
        share += float(total[v]) * float(dropped)
    return share
