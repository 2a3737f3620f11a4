"""32-bit arithmetic that wraps around, against the same of Python's integers."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from apertus_model.hashing import hashed, signed

WORD = 2**32


def murmur3_finaliser(value: int) -> int:
    value ^= value >> 16
    value = value * 0x85EBCA6B % WORD
    value ^= value >> 13
    value = value * 0xC2B2AE35 % WORD
    return value ^ (value >> 16)


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=9), st.integers(-(2**31), 2**31 - 1))
def test_the_hash_is_murmur3s_finaliser_of_the_sum(indices: list[int], seed: int) -> None:
    found = hashed(torch.tensor(indices, dtype=torch.int32), seed)
    assert found.dtype == torch.int32
    expected = [murmur3_finaliser((index + seed) % WORD) for index in indices]
    assert [value % WORD for value in found.tolist()] == expected


@given(st.integers(-(2**70), 2**70))
def test_a_signed_integer_has_the_low_bits(value: int) -> None:
    assert -(2**31) <= signed(value) < 2**31
    assert (signed(value) - value) % WORD == 0
