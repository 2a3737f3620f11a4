"""Cross-entropy with a weight per label. The plain one is torchtitan's, and stays that."""

from __future__ import annotations

import torch

from apertus_model.losses.sequences import label_log_probabilities


def weighted_cross_entropy(logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """sum_i w_i (-ln p(label_i)), a scalar in nats; divided by the sum of the weights of a whole step it is the step's loss.

    Args:
        logits: (batch, length, vocabulary).
        labels: (batch, length) int64; ignored ones (-100) count nothing, whatever their weight.
        weights: (batch, length) float32.
    """
    return -(label_log_probabilities(logits, labels) * weights).sum()


def total_weight(labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum of the weights of the labels that count, a float64 scalar."""
    return torch.where(labels >= 0, weights.double(), 0.0).sum()
