"""xIELU in one pass over memory: Triton kernels that read each input once and write each output once.

Imported only when they run. Invariants: everything between a load and a store is float32, so a result is
rounded once. The gradients of the scalars are summed within blocks and then over blocks, both in a fixed
order: equal inputs give equal bits.
"""

from typing import Any

import torch
import triton
import triton.language as tl

_BLOCK = 2048  # elements; two vector loads of bfloat16 for each of 128 threads
_SUMS = 4096  # sums of blocks that are added at a time


@triton.jit
def _parts(x):  # type: ignore[no-untyped-def]  # Triton's own types
    """The parts of x above and below 0; both are NaN where x is."""
    return (
        tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL),
        tl.minimum(x, 0.0, propagate_nan=tl.PropagateNan.ALL),
    )


@triton.jit
def _curve(x, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's own types
    """expm1(x) - x for x <= 0. Near 0, where the difference cancels, it is computed by its series: to two
    units in the last place of float32 if EXACT, else to a relative error of 2^-17, a small part of the
    rounding to bfloat16."""
    if EXACT:
        series = 1.0 / 39916800
        series = series * x + 1.0 / 3628800
        series = series * x + 1.0 / 362880
        series = series * x + 1.0 / 40320
        series = series * x + 1.0 / 5040
        series = series * x + 1.0 / 720
        series = series * x + 1.0 / 120
        series = series * x + 1.0 / 24
        border = -1.0
    else:
        series = x * (1.0 / 120) + 1.0 / 24
        border = -0.25
    series = series * x + 1.0 / 6
    series = series * x + 1.0 / 2
    return tl.where(x > border, series * (x * x), tl.exp(x) - (1.0 + x))


@triton.jit
def _softplus(pointer):  # type: ignore[no-untyped-def]  # Triton's own types
    """log(1 + exp(a)) of a stored scalar a: max(a, 0) + log1p(e), e = exp(-|a|) <= 1, by the series of
    log1p(e) = 2 atanh(e / (2 + e)): the logarithm of a GPU is inexact near 1."""
    a = tl.load(pointer).to(tl.float32)
    e = tl.exp(-tl.abs(a))
    s = e / (2.0 + e)  # at most 1/3
    square = s * s
    series = square * (1.0 / 15) + 1.0 / 13
    series = series * square + 1.0 / 11
    series = series * square + 1.0 / 9
    series = series * square + 1.0 / 7
    series = series * square + 1.0 / 5
    series = series * square + 1.0 / 3
    series = series * square + 1.0
    return tl.maximum(a, 0.0) + 2.0 * s * series


@triton.jit
def _xielu_forward(  # type: ignore[no-untyped-def]  # Triton's own types
    xs, alpha_p, alpha_n, ys, n, BETA: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n  # n is specialised: where 16 divides it, 16 bytes are loaded at a time
    x = tl.load(xs + at, mask=inside, other=0.0).to(tl.float32)
    slope_p, slope_n = _softplus(alpha_p), BETA + _softplus(alpha_n)
    above, below = _parts(x)
    y = slope_p * (above * above) + (slope_n * _curve(below, EXACT) + BETA * x)
    tl.store(ys + at, y.to(ys.dtype.element_ty), mask=inside)


@triton.jit
def _xielu_backward(  # type: ignore[no-untyped-def]  # Triton's own types
    gradients, xs, alpha_p, alpha_n, to_xs, sums, n, blocks,
    BETA: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    gradient = tl.load(gradients + at, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(xs + at, mask=inside, other=0.0).to(tl.float32)
    slope_p, slope_n = _softplus(alpha_p), BETA + _softplus(alpha_n)
    above, below = _parts(x)
    curve = _curve(below, EXACT)
    to_x = gradient * (2.0 * slope_p * above + (slope_n * (curve + below) + BETA))
    tl.store(to_xs + at, to_x.to(to_xs.dtype.element_ty), mask=inside)
    tl.store(sums + block, tl.sum(gradient * (above * above)))
    tl.store(sums + blocks + block, tl.sum(gradient * curve))


@triton.jit
def _total(sums, alpha, to_alpha, blocks, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # as above
    """Stores the sum of the blocks' sums, times the derivative of softplus."""
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, blocks, BLOCK):
        at = first + tl.arange(0, BLOCK)
        total += tl.load(sums + at, mask=at < blocks, other=0.0)
    a = tl.load(alpha).to(tl.float32)
    tl.store(to_alpha, (tl.sum(total) * tl.sigmoid(a)).to(to_alpha.dtype.element_ty))


@triton.jit
def _xielu_totals(  # type: ignore[no-untyped-def]  # Triton's own types
    sums, alpha_p, alpha_n, to_p, to_n, blocks, BLOCK: tl.constexpr
):
    if tl.program_id(0) == 0:
        _total(sums, alpha_p, to_p, blocks, BLOCK)
    else:
        _total(sums + blocks, alpha_n, to_n, blocks, BLOCK)


def forward(x: torch.Tensor, alpha_p: torch.Tensor, alpha_n: torch.Tensor, beta: float) -> torch.Tensor:
    """Computes `xielu.xielu` for float32 or bfloat16, on one GPU."""
    x = x.contiguous()
    y = torch.empty_like(x)
    if x.numel():
        blocks, options = _options(x, beta)
        _xielu_forward[(blocks,)](x, alpha_p, alpha_n, y, x.numel(), **options)
    return y


def backward(
    gradient: torch.Tensor, x: torch.Tensor, alpha_p: torch.Tensor, alpha_n: torch.Tensor, beta: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes `xielu.xielu_backward` for float32 or bfloat16, on one GPU."""
    gradient, x = gradient.contiguous(), x.contiguous()
    to_x, to_p, to_n = torch.empty_like(x), torch.empty_like(alpha_p), torch.empty_like(alpha_n)
    blocks, options = _options(x, beta)
    sums = torch.empty(2, blocks, dtype=torch.float32, device=x.device)
    if blocks:
        _xielu_backward[(blocks,)](gradient, x, alpha_p, alpha_n, to_x, sums, x.numel(), blocks, **options)
    _xielu_totals[(2,)](sums, alpha_p, alpha_n, to_p, to_n, blocks, BLOCK=_SUMS)
    return to_x, to_p, to_n


def _options(x: torch.Tensor, beta: float) -> tuple[int, dict[str, Any]]:
    """The number of blocks, and the constants of the kernels."""
    constants = {"BETA": beta, "EXACT": x.dtype == torch.float32, "BLOCK": _BLOCK}
    return triton.cdiv(x.numel(), _BLOCK), constants
