"""Makes random numbers without a generator: integers are mixed so that each bit depends on all bits.

Invariant: only 32-bit integer arithmetic that wraps around is used, so every device, and a Triton kernel,
gives the same bits.
"""

import torch

_MULTIPLIERS = (0x85EBCA6B, 0xC2B2AE35)  # of murmur3's finaliser; the kernel of AdEMAMix has the same


def hashed(index: torch.Tensor, seed: int) -> torch.Tensor:
    """murmur3's finaliser of index (int32, overwritten) + seed (signed 32-bit): 32 mixed bits."""
    mixed = index.add_(seed)
    for shift, multiplier in zip((16, 13), _MULTIPLIERS, strict=True):
        mixed.bitwise_xor_(_shifted(mixed, shift)).mul_(signed(multiplier))
    return mixed.bitwise_xor_(_shifted(mixed, 16))


def signed(value: int) -> int:
    """The signed 32-bit integer that has the low 32 bits of `value`."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def _shifted(value: torch.Tensor, bits: int) -> torch.Tensor:
    """The logical right shift of 32-bit integers."""
    return (value >> bits) & ((1 << (32 - bits)) - 1)
