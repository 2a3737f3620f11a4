"""AdEMAMix in one pass over memory: a Triton kernel that reads weight, gradient and moments once and writes
weight and moments once.

Imported only when it is used. Invariant: it computes what `ademamix.AdEMAMix` computes by foreach, in
float32, in the same order of operations, with the same stochastic rounding of bfloat16 moments; the two
differ by the rounding of single float32 operations.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def _round(value, index, seed, STOCHASTIC: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's own types
    """`value` rounded as by `rounding.round_stochastically`, as float32; `value` itself unless STOCHASTIC."""
    if STOCHASTIC:
        mixed = (index + seed).to(tl.uint32, bitcast=True)
        mixed = (mixed ^ (mixed >> 16)) * 0x85EBCA6B
        mixed = (mixed ^ (mixed >> 13)) * 0xC2B2AE35
        mixed = mixed ^ (mixed >> 16)
        bits = value.to(tl.uint32, bitcast=True) + (mixed & 0xFFFF)
        value = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    return value


@triton.jit
def _nearest(value, BFLOAT16: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's own types
    """`value` rounded to the nearest bfloat16, ties to even, in float32; Triton's interpreter truncates."""
    if BFLOAT16:
        bits = value.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        value = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    return value


@triton.jit(do_not_specialize=["seed1", "seed2", "seed3", "offset", "columns", "row"])
def _ademamix(  # type: ignore[no-untyped-def]  # Triton's own types
    weights, gradients, fasts, slows, squares, n, decay, step_size, mix, take1, keep2, take2, take3, root2,
    eps,
    seed1, seed2, seed3, offset, columns, row,
    CUT: tl.constexpr, BFLOAT16: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BLOCK
    at = first + tl.arange(0, BLOCK)
    inside = at < n  # n is specialised: where 16 divides it, 16 bytes are loaded at a time
    weight = tl.load(weights + at, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(gradients + at, mask=inside, other=0.0).to(tl.float32)
    fast = tl.load(fasts + at, mask=inside, other=0.0).to(tl.float32)
    slow = tl.load(slows + at, mask=inside, other=0.0).to(tl.float32)
    square = tl.load(squares + at, mask=inside, other=0.0).to(tl.float32)

    fast += take1 * (gradient - fast)
    slow += take3 * (gradient - slow)
    square = square * keep2 + take2 * gradient * gradient
    denominator = tl.div_rn(tl.sqrt_rn(square), root2) + eps
    weight = weight * decay - step_size * tl.div_rn(fast + mix * slow, denominator)

    if CUT:
        # one 64-bit division for the block, and one 32-bit division for each element
        rows = first // columns + ((first % columns).to(tl.int32) + tl.arange(0, BLOCK)) // columns
        index = (at + rows * (row - columns) + offset).to(tl.int32)
    else:
        index = (at + offset).to(tl.int32)
    tl.store(weights + at, _nearest(weight, BFLOAT16).to(weights.dtype.element_ty), mask=inside)
    tl.store(fasts + at, _round(fast, index, seed1, STOCHASTIC).to(fasts.dtype.element_ty), mask=inside)
    tl.store(slows + at, _round(slow, index, seed2, STOCHASTIC).to(slows.dtype.element_ty), mask=inside)
    tl.store(squares + at, _round(square, index, seed3, STOCHASTIC).to(squares.dtype.element_ty), mask=inside)


def update(
    weight: torch.Tensor,
    gradient: torch.Tensor,
    fast: torch.Tensor,
    slow: torch.Tensor,
    square: torch.Tensor,
    *,
    lr: float,
    betas: tuple[float, float, float],
    alpha: float,
    corrections: tuple[float, float],
    eps: float,
    weight_decay: float,
    rounding: tuple[list[int], int, int],
) -> None:
    """Updates one parameter for one step, in place.

    Args:
        weight, gradient: float32 or bfloat16.
        fast, slow, square: the moments; all float32 or all bfloat16.
        betas, alpha: their values at this step.
        corrections: (1 - b1^t, 1 - b2^t).
        rounding: seeds of the three moments, index of the first element and length of a row in the whole
            tensor; used for bfloat16 moments only.
    """
    assert (
        weight.dtype in (torch.float32, torch.bfloat16) and len({fast.dtype, slow.dtype, square.dtype}) == 1
    )
    assert weight.is_contiguous() and fast.is_contiguous() and slow.is_contiguous() and square.is_contiguous()
    if not weight.numel():
        return
    seeds, offset, row = rounding
    columns, row = (weight.shape[1], row) if weight.ndim == 2 else (0, 0)
    stochastic = fast.dtype == torch.bfloat16
    options: dict[str, Any] = {
        "CUT": stochastic and columns != row,  # rows of the whole tensor are longer
        "BFLOAT16": weight.dtype == torch.bfloat16,
        "STOCHASTIC": stochastic,
        "BLOCK": _BLOCK,
    }
    _ademamix[(triton.cdiv(weight.numel(), _BLOCK),)](
        weight, gradient.contiguous(), fast, slow, square, weight.numel(),
        1.0 - lr * weight_decay, lr / corrections[0], alpha * corrections[0], 1.0 - betas[0], betas[1],
        1.0 - betas[1],
        1.0 - betas[2], math.sqrt(corrections[1]), eps, *seeds, offset, columns, row, **options,
    )  # fmt: skip
