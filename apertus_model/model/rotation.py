"""Rotary position embedding (arXiv 2104.09864) as an operator: the formula in PyTorch, and on CUDA a Triton
kernel that reads and writes memory once.

The halves of a head are the two coordinates of its planes: with angles t and a vector (a, b),

    rotated = (a cos t - b sin t, b cos t + a sin t)

computed in float32. The gradient is rotated back, so nothing is kept for the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding


@torch.library.custom_op("apertus::rotate", mutates_args=())
def rotate(x: Tensor, table: Tensor, back: bool) -> Tensor:
    """Rotates `x` (batch, length, heads, 2 h), or rotates it back. `table`: float32 (batch or 1, length, 1, 4
    h), with h cosines for each position, the same cosines again, h sines and the same sines again.
    Differentiable with respect to `x`, any number of times."""
    cosine, _, sine, _ = table.chunk(4, dim=-1)
    a, b = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    if back:
        sine = -sine
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], dim=-1).to(x.dtype)


@rotate.register_kernel("cuda")
def _(x: Tensor, table: Tensor, back: bool) -> Tensor:
    from apertus_model.model.rotation_triton import rotated

    return rotated(x, table, back)


@rotate.register_fake
def _(x: Tensor, table: Tensor, back: bool) -> Tensor:
    return x.new_empty(x.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: Tensor) -> None:
    _, table, ctx.back = inputs
    ctx.save_for_backward(table)


rotate.register_autograd(
    lambda ctx, gradient: (rotate(gradient, *ctx.saved_tensors, not ctx.back), None, None),
    setup_context=_save,
)


@register_sharding(torch.ops.apertus.rotate.default)
def _(x: Any, table: Any, back: bool) -> list[tuple[list[Placement], list[Placement | None]]]:
    """Lets DTensors be split by heads."""
    return [([split], [split, Replicate(), None]) for split in (Replicate(), Shard(2))]
