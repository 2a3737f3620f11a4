"""Stochastic rounding of float32 to bfloat16, without a random generator.

Invariant: the random number of an element is a function of a seed and of the element's index in the whole
tensor. So rounding repeats bit by bit after a restart, does not depend on how the tensor is sharded, and is
the same in torch and in the Triton kernel, which has the same integer arithmetic.
"""

import zlib

import torch

from apertus_model.hashing import hashed, signed


def rounding_seed(name: str, step: int, moment: int) -> int:
    """Seed of the rounding of a state of a parameter in an update, as a signed 32-bit integer."""
    return signed(zlib.crc32(f"{name}/{step}/{moment}".encode()))


def round_stochastically(values: torch.Tensor, seed: int, offset: int = 0, row: int = 0) -> torch.Tensor:
    """Rounds each float32 value to one of the two nearest bfloat16 values. The nearer one is likelier, so
    that the mean is the value itself; values that bfloat16 can represent do not change.

    Args:
        values: float32, contiguous; this process's part of a tensor.
        seed: signed 32-bit integer.
        offset: index of the first element of `values` in the whole tensor, flattened.
        row: length of a row of the whole tensor; 0 for that of `values`.
    """
    bits = values.view(torch.int32)
    rounded = (bits + (hashed(_index(values.shape, offset, row, values.device), seed) & 0xFFFF)) & -0x10000
    return rounded.view(torch.float32).to(torch.bfloat16)


def _index(shape: torch.Size, offset: int, row: int, device: torch.device) -> torch.Tensor:
    """Index in the whole tensor of each element, modulo 2^32."""
    if len(shape) != 2 or row in (0, shape[1]):
        return torch.arange(shape.numel(), dtype=torch.int32, device=device).view(shape) + signed(offset)
    rows, columns = (torch.arange(size, dtype=torch.int32, device=device) for size in shape)
    return rows[:, None] * row + columns + signed(offset)
