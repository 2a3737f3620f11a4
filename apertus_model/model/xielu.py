"""xIELU (arXiv 2411.13010) and its gradients: in PyTorch, and as an operator that uses memory once.

With a_p = softplus(alpha_p), a_n = beta + softplus(alpha_n):

    x >  0:  a_p x^2 + beta x
    x <= 0:  a_n (expm1(x) - x) + beta x

The operator runs Triton's kernels on CUDA and the formula elsewhere. It is opaque to code that traces it,
such as fake tensors and rehearsals, which count what it reads and writes.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

BETA = 0.5


def formula(x: Tensor, slope_p: Tensor, slope_n: Tensor) -> Tensor:
    """The activation of x, given a_p and a_n."""
    above = x.clamp(min=0)
    below = x - above
    curved = torch.expm1(below).sub_(below).mul_(slope_n)
    return above.square().mul_(slope_p).add_(curved).add_(x, alpha=BETA)


def formula_backward(
    gradient: Tensor, x: Tensor, slope_p: Tensor, slope_n: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients with respect to x, a_p and a_n; those of the slopes are float32 sums."""
    above = x.clamp(min=0)
    below = x - above
    bend = torch.expm1(below)
    to_slope_p = above.square().mul_(gradient).sum(dtype=torch.float32)
    to_slope_n = (bend - below).mul_(gradient).sum(dtype=torch.float32)
    to_x = above.mul_(2 * slope_p).add_(bend.mul_(slope_n)).add_(BETA).mul_(gradient)
    return to_x, to_slope_p, to_slope_n


@torch.library.custom_op("apertus::xielu", mutates_args=())
def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> Tensor:
    """The activation of `x` of any shape; `alpha_p` and `alpha_n` are one element. Differentiable once."""
    return formula(x, F.softplus(alpha_p), BETA + F.softplus(alpha_n))


@torch.library.custom_op("apertus::xielu_backward", mutates_args=())
def xielu_backward(
    gradient: Tensor, x: Tensor, alpha_p: Tensor, alpha_n: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients with respect to `x`, `alpha_p` and `alpha_n`, each in the dtype of that tensor."""
    slopes = F.softplus(alpha_p), BETA + F.softplus(alpha_n)
    to_x, *to_slopes = formula_backward(gradient, x, *slopes)
    to_p, to_n = (
        (to_slope * torch.sigmoid(alpha)).to(alpha.dtype)
        for to_slope, alpha in zip(to_slopes, (alpha_p, alpha_n), strict=True)
    )
    return to_x, to_p, to_n


@xielu.register_kernel("cuda")
def _(x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> Tensor:
    from apertus_model.model.xielu_triton import forward

    return forward(x, alpha_p, alpha_n, BETA)


@xielu_backward.register_kernel("cuda")
def _(gradient: Tensor, x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    from apertus_model.model.xielu_triton import backward

    return backward(gradient, x, alpha_p, alpha_n, BETA)


@xielu.register_fake
def _(x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@xielu_backward.register_fake
def _(gradient: Tensor, x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(alpha_p), torch.empty_like(alpha_n)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


xielu.register_autograd(
    lambda ctx, gradient: xielu_backward(gradient, *ctx.saved_tensors), setup_context=_save
)

# The layouts of DTensors: any split of x, whole scalars. Each rank then has its own part of the scalars'
# gradients.
Shardings = list[tuple[list[Placement], list[Placement]]]


def _splits(x: Any) -> list[Placement]:
    return [Replicate(), *(Shard(axis) for axis in range(x.ndim))]


@register_sharding(torch.ops.apertus.xielu.default)
def _(x: Any, alpha_p: Any, alpha_n: Any) -> Shardings:
    return [([split], [split, Replicate(), Replicate()]) for split in _splits(x)]


@register_sharding(torch.ops.apertus.xielu_backward.default)
def _(gradient: Any, x: Any, alpha_p: Any, alpha_n: Any) -> Shardings:
    whole = Replicate()
    return [
        ([split, *[part] * 2], [split, split, whole, whole])
        for split in _splits(x)
        for part in [whole if split == whole else Partial()]
    ]
