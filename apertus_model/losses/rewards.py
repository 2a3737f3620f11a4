"""Rewards of sequences, from hidden states and the weight of a reward model's head.

Shape suffixes: B batch, L local sequence, D width, N places.

Invariant: rewards are float32 (float64 for float64 parameters) whatever the precision of the model, so
rounding makes no ties. A reward depends on the hidden state of its place alone.
"""

from __future__ import annotations

import torch

from apertus_model.losses.cross_entropy import FULL_VOCAB, IGNORE_INDEX, VocabShard


def token_rewards(
    hidden_BLD: torch.Tensor,
    weight_1D: torch.Tensor,
    labels_BL: torch.Tensor,
    vocab: VocabShard = FULL_VOCAB,
) -> torch.Tensor:
    """The reward at every place with a label, 0 elsewhere: (batch, length).

    Args:
        hidden_BLD: (batch, length, width), any floating dtype.
        weight_1D: (1, width), same dtype.
        labels_BL: (batch, length) int64, on the host or on the device of the states (then the host waits for
            the number of labels); -100 where there is no reward.
        vocab: all words; every loss function has this argument.
    """
    assert vocab.group is None, "every rank has the whole head"
    places_N2 = torch.nonzero(labels_BL != IGNORE_INDEX).to(hidden_BLD.device, non_blocking=True)
    row_N, place_N = places_N2.unbind(1)
    dtype = torch.promote_types(hidden_BLD.dtype, torch.float32)
    rewards_N = hidden_BLD[row_N, place_N].to(dtype) @ weight_1D[0].to(dtype)
    return rewards_N.new_zeros(labels_BL.shape).index_put((row_N, place_N), rewards_N)
