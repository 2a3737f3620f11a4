"""The Gauss-Newton-Bartlett estimate of the Hessian's diagonal (arXiv 2305.14342, algorithm 2), from the
gradients of an extra pass.

For a loss sum_i w_i ce_i / W over tokens i, W the sum of the weights w_i of the step, the diagonal of the
Gauss-Newton matrix is sum_i w_i E[(d ce_i)^2] / W, with labels from the model's own distribution. Draws are
independent and a gradient d ce_i is 0 on average, so the square of

    u = d/dw sum_i sqrt(w_i) ce_i(drawn label) / sqrt(W)

has that expectation. With w_i = 1 and W = B kept tokens it is the paper's B (d mean ce)^2. It covers all kept
tokens of the step.

Invariant: the label drawn for a token depends on the model, the step and the token's place in the step's
batch (`losses.drawn_labels`).
"""

from __future__ import annotations

import zlib

import torch

from apertus_model.hashing import signed
from apertus_model.losses.cross_entropy import VocabShard, cross_entropy
from apertus_model.losses.drawn_labels import draw_labels


def drawn_labels_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    vocab: VocabShard,
    *,
    step: int,
    weights: torch.Tensor,
    places: torch.Tensor,
    denominator: torch.Tensor,
) -> torch.Tensor:
    """The loss whose gradient, summed over the micro-batches and ranks of a step, is u; arguments as for
    `WithExtraPass.extra_loss`."""
    seed = signed(zlib.crc32(f"labels/{step}".encode()))
    drawn = draw_labels(hidden, weight, labels, places, seed, vocab)
    return cross_entropy(hidden, weight, drawn, denominator.sqrt(), weights.sqrt(), vocab)
