"""The softmax of rows of logits in two passes over memory: Triton kernels that read the logits once for their
sums, and once more for the gradient, which overwrites them.

Imported only when they run. Invariants: everything between a load and a store is float32, so a result is
rounded once. Each row is summed by one block, in a fixed order: equal inputs give equal bits.
"""

import torch
import triton
import triton.language as tl

_BLOCK = 4096  # logits; two vector loads of bfloat16 for each of 256 threads
_WARPS = 8
_LOWEST = tl.constexpr(-3.0e38)  # of what is no logit


@triton.jit
def _row_sums(  # type: ignore[no-untyped-def]  # Triton's own types
    logits, largest, totals, words, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    whole = tl.full([], _LOWEST, tl.float32)  # the largest logit until now
    total = tl.zeros([BLOCK], tl.float32)  # of exp(logit - whole), at each place of the blocks
    for first in range(0, words, BLOCK):
        inside = first + lane < words
        x = tl.load(logits + row * words + first + lane, mask=inside, other=_LOWEST).to(tl.float32)
        before, whole = whole, tl.maximum(whole, tl.max(x))
        total = total * tl.exp(before - whole) + tl.exp(x - whole)
    tl.store(largest + row, whole)
    tl.store(totals + row, tl.sum(total))


@triton.jit
def _to_gradient(  # type: ignore[no-untyped-def]  # Triton's own types
    logits, labels, largest, factors, at_labels, words, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = logits + row * words + lane
    inside = lane < words
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(factors + row) * tl.exp(x - tl.load(largest + row))
    gradient -= tl.where(lane == tl.load(labels + row), tl.load(at_labels + row), 0.0)
    tl.store(at, gradient.to(logits.dtype.element_ty), mask=inside)


def row_sums(logits_CV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `softmax.row_sums` for float32 or bfloat16, on one GPU."""
    assert logits_CV.is_contiguous()
    rows, words = logits_CV.shape
    largest_C, total_C = (torch.empty(rows, dtype=torch.float32, device=logits_CV.device) for _ in range(2))
    _row_sums[(rows,)](logits_CV, largest_C, total_C, words, BLOCK=_BLOCK, num_warps=_WARPS)
    return largest_C, total_C


def to_gradient(
    logits_CV: torch.Tensor,
    labels_C: torch.Tensor,
    largest_C: torch.Tensor,
    factors_C: torch.Tensor,
    at_label_C: torch.Tensor,
) -> None:
    """Computes `softmax.to_gradient` for float32 or bfloat16, on one GPU."""
    assert logits_CV.is_contiguous()
    rows, words = logits_CV.shape
    grid = rows, triton.cdiv(words, _BLOCK)
    _to_gradient[grid](
        logits_CV, labels_C, largest_C, factors_C, at_label_C, words, BLOCK=_BLOCK, num_warps=_WARPS
    )
