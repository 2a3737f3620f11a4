"""The feed-forward blocks: two matrices around xIELU, Apertus' activation (arXiv 2411.13010), or SwiGLU.

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

from apertus_model.device import has_kernels
from apertus_model.model.xielu import BETA, formula, formula_backward, xielu

EPS = -1e-6
INITIAL_ALPHA = 0.8


def inverse_softplus(value: float) -> float:
    """The x with softplus(x) = value, for value > 0."""
    return math.log(math.expm1(value))


# The published runs hold the scalars in bfloat16 and compute log(exp(x) - 1) in it, which is 0.2109 and
# -1.0469: slopes of 0.804 and 0.801. These are the values that are meant, 0.2034 and -1.0502: slopes of 0.8.
INITIAL_ALPHA_P = inverse_softplus(INITIAL_ALPHA)
INITIAL_ALPHA_N = inverse_softplus(INITIAL_ALPHA - BETA)


class XIELU(Module):
    """Elementwise activation with two trained scalars per layer, `alpha_p` and `alpha_n`, each of shape (1,).

    `apertus_model.model.xielu` has the formula. The published form has expm1(min(x, eps)) with eps = -1e-6 in
    place of expm1(x). The two differ only between eps and 0, by at most a_n * 1e-6, and there the published
    one has no derivative of that term. Exports state eps, since transformers computes with it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.alpha_p = nn.Parameter(torch.empty(1))
        self.alpha_n = nn.Parameter(torch.empty(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Applies the activation to `x` of any shape; the result has its shape and dtype."""
        if has_kernels(x):
            return xielu(x, self.alpha_p, self.alpha_n)
        return _XIELU.apply(x, F.softplus(self.alpha_p), BETA + F.softplus(self.alpha_n))


class _XIELU(torch.autograd.Function):
    """The formula with its own backward pass, which keeps only `x`. The tensors that autograd would keep are
    several times the size of all other activations of a layer, and a CPU would spend its time moving them.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, slope_p: torch.Tensor, slope_n: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, slope_p, slope_n)
        return formula(x, slope_p, slope_n)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x, slope_p, slope_n = ctx.saved_tensors
        to_x, to_p, to_n = formula_backward(gradients[0], x, slope_p, slope_n)
        return to_x, to_p.to(slope_p.dtype).view(1), to_n.to(slope_n.dtype).view(1)


class ApertusFeedForward(Module):
    """down_proj(xielu(up_proj x)) or, with a gate, SwiGLU (arXiv 2002.05202): down_proj(silu(gate_proj x) *
    up_proj x); (batch, seq_len, dim) -> (batch, seq_len, dim)."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        up_proj: Linear.Config
        down_proj: Linear.Config
        act: XIELU.Config | None = None
        gate_proj: Linear.Config | None = None

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = None if config.gate_proj is None else config.gate_proj.build()
        self.up_proj = config.up_proj.build()
        self.act: Any = None if config.act is None else config.act.build()
        self.down_proj = config.down_proj.build()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gate_proj is not None:
            return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return self.down_proj(self.act(self.up_proj(x)))
