"""Published formulas in float64. Processes that interpret kernels import them, and little else."""

import torch
import torch.nn.functional as F

from apertus_model.model.xielu import BETA

Tensors = tuple[torch.Tensor, ...]


def xielu_in_float64(
    gradient: torch.Tensor, x: torch.Tensor, alpha_p: torch.Tensor, alpha_n: torch.Tensor
) -> tuple[Tensors, Tensors]:
    """Value and gradients by x, alpha_p and alpha_n, in float64; and for each, the sum of the sizes of its
    terms, to which rounding is relative."""
    g, x, p, n = (one.detach().double().requires_grad_() for one in (gradient, x, alpha_p, alpha_n))
    slope_p, slope_n = F.softplus(p, threshold=1e3), BETA + F.softplus(n, threshold=1e3)
    below = x.clamp(max=0)
    value = torch.where(x > 0, slope_p * x**2, slope_n * (torch.expm1(below) - below)) + BETA * x
    found = value, *torch.autograd.grad(value, (x, p, n), g)
    with torch.no_grad():
        square, bend = x.clamp(min=0) ** 2, torch.expm1(below)
        sizes = (
            slope_p * square + slope_n * (bend - below) + BETA * x.abs(),
            g.abs() * (2 * slope_p * x.clamp(min=0) + slope_n * bend.abs() + BETA),
            (g * square).abs().sum() * torch.sigmoid(p),
            (g * (bend - below)).abs().sum() * torch.sigmoid(n),
        )
    return tuple(one.detach() for one in found), sizes


def table(batch: int, length: int, half: int, generator: torch.Generator | None = None) -> torch.Tensor:
    """Rows of positions that differ from one another."""
    angles = 1e4 * torch.rand(batch, length, 1, half, generator=generator)
    return torch.cat([angles.cos()] * 2 + [angles.sin()] * 2, dim=-1)


def rotated_in_float64(x: torch.Tensor, rows: torch.Tensor, back: bool) -> torch.Tensor:
    """In float64: a product of complex numbers."""
    cosine, _, sine, _ = rows.double().chunk(4, dim=-1)
    turned = torch.complex(*x.double().chunk(2, dim=-1)) * torch.complex(cosine, -sine if back else sine)
    return torch.cat([turned.real, turned.imag], dim=-1)
