"""Sums of the log-probabilities of labels over the sequences of packed rows; rewards of sequences, from
hidden states and the weight of a reward model's head.

Shape suffixes: B batch, L local sequence, S sequences per packed row, D width, N places.

Invariants: the sum of a sequence depends on its own row alone. It has the same bits at any position in the
batch, and with or without gradients. Rewards are float32 (float64 for float64 parameters) whatever the
precision of the model, so rounding makes no ties; a reward depends on the hidden state of its place alone.
"""

from typing import Any

import torch
import torch.distributed as dist

from apertus_model.losses.cross_entropy import IGNORE_INDEX, LastStates


def sequence_sums(values_BL: torch.Tensor, segments_BL: torch.Tensor, sequences: int) -> torch.Tensor:
    """Sums of `values_BL` over the places of each sequence: (batch, sequences), float64. `segments_BL`:
    int64, index of the sequence that a place belongs to, -1 for none; `sequences`: their number per row."""
    members_BSL = segments_BL[:, None, :] == torch.arange(sequences, device=segments_BL.device)[None, :, None]
    return torch.where(members_BSL, values_BL.double()[:, None, :], 0.0).sum(dim=-1)


def sequence_log_probabilities(
    log_probabilities_BL: torch.Tensor,
    labels_BL: torch.Tensor,
    segments_BL: torch.Tensor,
    sequences: int,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """ln p(y|x) of every sequence, and |y|: two tensors (batch, sequences), in the dtype of the
    log-probabilities, summed in float64.

    Args:
        log_probabilities_BL: (batch, length), 0 where there is no label (`cross_entropy.log_probabilities`).
        labels_BL: (batch, length) int64, the labels of the sequences' completions, -100 elsewhere.
        segments_BL, sequences: as in `sequence_sums`.
        group: the processes that share each row, each with its slice; None when a process has whole rows.
    """
    scored = labels_BL != IGNORE_INDEX
    sums = torch.stack(
        [sequence_sums(values, segments_BL, sequences) for values in (log_probabilities_BL, scored)]
    )
    if group is not None:
        sums = shared_sum(sums, group)
    total, lengths = sums.to(log_probabilities_BL.dtype).unbind()
    return total, lengths.detach()


def token_rewards(states: LastStates) -> torch.Tensor:
    """The reward at places with a label, else 0: (batch, length). The weight of the head is (1, width)."""
    hidden_BLD, weight_1D, labels_BL, vocab = states
    assert vocab.group is None, "every rank has the whole head"
    places_N2 = torch.nonzero(labels_BL != IGNORE_INDEX).to(hidden_BLD.device, non_blocking=True)
    row_N, place_N = places_N2.unbind(1)
    dtype = torch.promote_types(hidden_BLD.dtype, torch.float32)
    rewards_N = hidden_BLD[row_N, place_N].to(dtype) @ weight_1D[0].to(dtype)
    return rewards_N.new_zeros(labels_BL.shape).index_put((row_N, place_N), rewards_N)


def shared_sum(values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of `values` over `group`, the same on each process, which gets the gradient of its part once.

    Use it where all processes compute the same function of the sum: the backward pass reduces nothing."""
    return _SharedSum.apply(values, group)


class _SharedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = values.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None
