"""The benchmark that says what the Goldfish hash leaves out: its numbers are those of the definition."""

from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("tokenizers")
from apertus_model.data.tokens.goldfish import TABLE_SIZE, goldfish_mask, hash_table
from benchmarks.goldfish_share import MANY, share

K = H = 50


def test_shares_are_those_of_products_of_whole_numbers() -> None:
    # odd: no window of the second row has a factor of two
    labels = np.random.default_rng(0).integers(0, 32_768, size=(2, 300)) | 1
    labels[0] *= 2  # one each, so 50 to a window
    labels[0, 150:] *= 2  # two each: up to 100
    windows = [row[at : at + H] for row in labels.tolist() for at in range(300 - H + 1)]
    hashes = [math.prod(window) % 2**64 for window in windows]
    signed = [value - 2**64 if value >= 2**63 else value for value in hashes]
    dropped = [bool(int(hash_table()[value % TABLE_SIZE]) * K < 2**24) for value in signed]
    whole, zero, many, few, of_many, of_few = share(labels, K, H)
    assert whole == sum(dropped) / labels.size == goldfish_mask(labels, K, H).mean()
    assert zero == hashes.count(0) / len(hashes)
    often = [drop for value, drop in zip(hashes, dropped, strict=True) if value and value % 2**MANY == 0]
    seldom = [drop for value, drop in zip(hashes, dropped, strict=True) if value % 2**MANY]
    assert (
        (many, few) == (len(often) / len(hashes), len(seldom) / len(hashes))
        and 0 < zero < 0.5
        and many > 0
        and few == 0.5
    )
    assert (of_many, of_few) == (pytest.approx(np.mean(often)), pytest.approx(np.mean(seldom)))


def test_a_window_with_enough_factors_of_two_never_loses_its_label() -> None:
    assert share(np.full((1, 200), 4, dtype=np.int64), K, H)[:2] == (0.0, 1.0)  # 100 factors of two
