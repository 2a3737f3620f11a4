"""Losses on the log-ratios of completions to a reference model, QRPO (arXiv 2507.08068) and DPO (arXiv
2305.18290); and on the rewards of completions, Bradley-Terry.

r = ln pi(y|x) - ln pi_ref(y|x) is the log-ratio of a completion, |y| the number of its tokens, including the
end-of-turn token. The length-normalised beta_i = beta / |y| replaces beta everywhere, also in the partition
function (Apertus report, section 4.3).

Invariant: the functions are elementwise; they keep shape and dtype, and sum nothing.
"""

import math

import torch
import torch.nn.functional as F


def sequence_beta(
    lengths: torch.Tensor, *, beta: float, length_normalised: bool, beta_max: float | None = None
) -> torch.Tensor:
    """beta_i of every completion, float64: beta, or beta / |y| and at most `beta_max`. `lengths`: |y|, any
    shape and dtype; 0 (no completion there) counts as 1."""
    if not length_normalised:
        return torch.full_like(lengths, beta, dtype=torch.float64)
    return (beta / lengths.double().clamp(min=1)).clamp(max=math.inf if beta_max is None else beta_max)


_PARTITION_SERIES = (
    1 / 24,
    -1 / 2880,
    1 / 181440,
    -1 / 9676800,
    1 / 479001600,
    -691 / 15692092416000,
    1 / 784604620800,
)
"""B_2n / (2n (2n)!), n = 1, 2, ..., of the Bernoulli numbers B_2n."""


def beta_log_partition(beta: torch.Tensor) -> torch.Tensor:
    """beta ln Z(beta), Z(beta) = beta (exp(1/beta) - 1), beta in (0, inf): float64, relative error < 1e-14.

    With x = 1/beta, ln(exp(x) - 1) = x + ln(1 - exp(-x)), which does not overflow for a small beta. For a
    large beta, ln Z is close to 0 and its rounding error would be multiplied by beta. There the series
    ln((exp(x) - 1) / x) = x/2 + sum_n B_2n x^2n / (2n (2n)!) is used.
    """
    beta = beta.double()
    x = 1 / beta
    small_beta = 1 + beta * (beta.log() + torch.log1p(-torch.exp(-x)))
    series = torch.zeros_like(x)
    for coefficient in reversed(_PARTITION_SERIES):
        series = series * x * x + coefficient
    return torch.where(x > 0.5, small_beta, 0.5 + series * x)


def qrpo_residual(log_ratio: torch.Tensor, quantiles: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """q - beta ln Z(beta) - beta r, whose square is the loss (arXiv 2507.08068, for quantile rewards): q is
    the share of the reference completions' rewards that are not above the completion's, r the log-ratio. The
    target is computed in float64 and rounded once."""
    target = (quantiles.double() - beta_log_partition(beta)).to(log_ratio.dtype)
    return target - beta.to(log_ratio.dtype) * log_ratio


def dpo(margin: torch.Tensor, label_smoothing: float = 0.0) -> torch.Tensor:
    """-(1 - e) ln sigmoid(m) - e ln sigmoid(-m), of the margins m = beta_c r_c - beta_r r_r of chosen over
    rejected completions; e is the assumed share of pairs whose preference is wrong (conservative DPO)."""
    return -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)


def bradley_terry(
    chosen: torch.Tensor, rejected: torch.Tensor, margin: torch.Tensor, centring: float
) -> torch.Tensor:
    """-ln sigmoid(r_c - r_r - m) + c (r_c + r_r)^2, of the rewards of chosen and rejected completions. The
    margin m asks for a larger difference (arXiv 2307.09288); the second term, with its factor c, keeps the
    mean of the rewards near 0, which the first leaves open (arXiv 2312.09244)."""
    return -F.logsigmoid(chosen - rejected - margin) + centring * (chosen + rejected).square()
