"""The feed-forward blocks: two matrices around xIELU, the trainable activation of Apertus (arXiv 2411.13010),
or SwiGLU.

Invariant: the effective slopes of xIELU stay positive, since both trained scalars pass through softplus; beta
and eps are constants of the function, not parameters.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torchtitan.models.common import Linear
from torchtitan.protocols.module import Module

BETA = 0.5
EPS = -1e-6
INITIAL_ALPHA = 0.8


def inverse_softplus(value: float) -> float:
    """The x with softplus(x) = value, for value > 0."""
    return math.log(math.expm1(value))


INITIAL_ALPHA_P = inverse_softplus(INITIAL_ALPHA)
INITIAL_ALPHA_N = inverse_softplus(INITIAL_ALPHA - BETA)


class XIELU(Module):
    """Elementwise activation with two trained scalars per layer, `alpha_p` and `alpha_n`, each of shape (1,).

    With a_p = softplus(alpha_p), a_n = beta + softplus(alpha_n):

        x >  0:  a_p x^2 + beta x
        x <= 0:  a_n (expm1(x) - x) + beta x

    The published form has min(x, eps) in place of x inside expm1, eps = -1e-6, which is the same up to a_n *
    1e-6 between eps and 0, and leaves no derivative there. Exports state eps, since transformers computes
    with it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.alpha_p = nn.Parameter(torch.empty(1))
        self.alpha_n = nn.Parameter(torch.empty(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the activation to `x` of any shape; the result has its shape and dtype."""
        return _XIELU.apply(x, F.softplus(self.alpha_p), BETA + F.softplus(self.alpha_n))


class _XIELU(torch.autograd.Function):
    """The formula with a backward pass of its own, which keeps `x` alone: the tensors that autograd would
    keep for it are several times the size of all other activations of a layer, and moving them is what the
    CPU would spend its time on.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, slope_p: torch.Tensor, slope_n: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, slope_p, slope_n)
        above = x.clamp(min=0)
        below = x - above
        curved = torch.expm1(below).sub_(below).mul_(slope_n)
        return above.square().mul_(slope_p).add_(curved).add_(x, alpha=BETA)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        (gradient,) = gradients
        x, slope_p, slope_n = ctx.saved_tensors
        above = x.clamp(min=0)
        below = x - above
        bend = torch.expm1(below)
        to_slope_p = above.square().mul_(gradient).sum(dtype=torch.float32)
        to_slope_n = (bend - below).mul_(gradient).sum(dtype=torch.float32)
        to_x = above.mul_(2 * slope_p).add_(bend.mul_(slope_n)).add_(BETA).mul_(gradient)
        return to_x, to_slope_p.to(slope_p.dtype).view(1), to_slope_n.to(slope_n.dtype).view(1)


class ApertusFeedForward(Module):
    """Two matrices around xIELU, without a gate: (batch, seq_len, dim) -> (batch, seq_len, dim)."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        up_proj: Linear.Config
        down_proj: Linear.Config
        act: XIELU.Config

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.up_proj = config.up_proj.build()
        self.act = config.act.build()
        self.down_proj = config.down_proj.build()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the feed-forward block position by position."""
        return self.down_proj(self.act(self.up_proj(x)))


class GatedFeedForward(Module):
    """SwiGLU (arXiv 2002.05202): down_proj(silu(gate_proj x) * up_proj x), (batch, seq_len, dim) -> (batch,
    seq_len, dim)."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        gate_proj: Linear.Config
        up_proj: Linear.Config
        down_proj: Linear.Config

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = config.gate_proj.build()
        self.up_proj = config.up_proj.build()
        self.down_proj = config.down_proj.build()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the feed-forward block position by position."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
