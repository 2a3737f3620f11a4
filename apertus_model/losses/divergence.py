"""The Kullback-Leibler divergence between the predictions of two models, over the whole vocabulary."""

from __future__ import annotations

import torch

_CHUNK_ELEMENTS = 1 << 24  # bounds the float64 temporaries to a few of 128 MiB


def kl_divergence(logits: torch.Tensor, other_logits: torch.Tensor) -> torch.Tensor:
    """sum_i KL(p_i || q_i) in nats, a float64 scalar; p = softmax(logits), q = softmax(other_logits),
    computed in float64.

    Args:
        logits: (places, vocabulary), any floating dtype.
        other_logits: the same shape.
    """
    total = torch.zeros((), dtype=torch.float64, device=logits.device)
    places = max(1, _CHUNK_ELEMENTS // logits.shape[-1])
    for own, other in zip(logits.split(places), other_logits.split(places), strict=True):
        log_p, log_q = own.double().log_softmax(-1), other.double().log_softmax(-1)
        total += (log_p.exp() * (log_p - log_q)).sum()
    return total
