"""Losses on the log-ratios of completions to a reference model: QRPO (arXiv 2507.08068) and DPO (arXiv 2305.18290).

r = ln pi(y|x) - ln pi_ref(y|x) is the log-ratio of a completion, |y| its tokens with the end-of-turn token. The length-normalised
beta_i = beta / |y| replaces beta everywhere, also in the partition function (Apertus report, section 4.3).

Invariant: functions of elements; they keep shape and dtype, and sum nothing.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F


def sequence_beta(lengths: torch.Tensor, *, beta: float, length_normalised: bool, beta_max: float | None = None) -> torch.Tensor:
    """beta_i of every completion, float64.

    Args:
        lengths: |y|, any shape and dtype; 0 (no completion there) counts as 1.
        beta: strength of the tie to the reference.
        length_normalised: beta / |y|, at most `beta_max`, instead of beta.
        beta_max: limit of a normalised beta; None for none.
    """
    if not length_normalised:
        return torch.full_like(lengths, beta, dtype=torch.float64)
    return (beta / lengths.double().clamp(min=1)).clamp(max=math.inf if beta_max is None else beta_max)


def beta_log_partition(beta: torch.Tensor) -> torch.Tensor:
    """beta ln Z(beta), Z(beta) = beta (exp(1/beta) - 1), for beta > 0: float64.

    With x = 1/beta, ln(exp(x) - 1) = x + ln(1 - exp(-x)), which neither overflows for a small beta nor loses digits; for a large one,
    beta and exp(x) - 1 are multiplied before the logarithm.
    """
    beta = beta.double()
    x = 1 / beta
    small_beta = 1 + beta * (beta.log() + torch.log1p(-torch.exp(-x)))
    large_beta = beta * torch.log(torch.expm1(x.clamp(max=1)) * beta.clamp(min=1))
    return torch.where(x > 1, small_beta, large_beta)


def qrpo_residual(log_ratio: torch.Tensor, quantiles: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """q - beta ln Z(beta) - beta r, of which the loss is the square (arXiv 2507.08068, the quantile reward's case).

    Args:
        log_ratio: r.
        quantiles: q, the share of the reference completions' rewards that are not above the completion's.
        beta: beta_i, float64; the target is computed in float64 and rounded once.
    """
    target = (quantiles.double() - beta_log_partition(beta)).to(log_ratio.dtype)
    return target - beta.to(log_ratio.dtype) * log_ratio


def dpo(margin: torch.Tensor, label_smoothing: float = 0.0) -> torch.Tensor:
    """-(1 - e) ln sigmoid(m) - e ln sigmoid(-m), of the margins m = beta_c r_c - beta_r r_r of chosen over rejected completions; e is the
    share of the pairs that are taken to be the wrong way round (conservative DPO)."""
    return -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)
