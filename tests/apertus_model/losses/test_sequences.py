"""Log-probabilities of sequences in packed rows, and the divergence over the vocabulary, against numpy in
float64."""

from typing import Any

import numpy as np
import pytest
import torch

from apertus_model.losses.cross_entropy import LastStates, log_probabilities
from apertus_model.losses.sequences import sequence_log_probabilities, sequence_sums
from tests.apertus_model.ranks import in_processes

LABELS = torch.tensor([[4, 1, -100, 2, 0, -100], [3, -100, 3, -100, 1, 1]])
SEGMENTS = torch.tensor([[0, 0, -1, 1, 1, -1], [0, -1, 1, -1, 2, 2]])
LENGTHS = torch.tensor([[2, 2, 0], [1, 1, 2]])


def logits_of(seed: int) -> torch.Tensor:
    return torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_hand(logits: torch.Tensor) -> np.ndarray:
    """ln softmax(logits)[label] at every place."""
    values = logits.double().numpy()
    normaliser = np.log(np.exp(values).sum(-1))
    return np.array(
        [
            [values[b, i, y] - normaliser[b, i] if y >= 0 else 0.0 for i, y in enumerate(row)]
            for b, row in enumerate(LABELS.tolist())
        ]
    )


def of_sequences(
    logits: torch.Tensor, places: slice = slice(None), group: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and lengths of the sequences; hidden states are the logits themselves, projected
    by the unit matrix."""
    labels = LABELS[:, places]
    found = log_probabilities(LastStates(logits, torch.eye(5, dtype=logits.dtype), labels))
    return sequence_log_probabilities(found, labels, SEGMENTS[:, places], 3, group)


def test_a_sequence_sums_the_labels_of_its_own_segment() -> None:
    logits = logits_of(1)
    total, lengths = of_sequences(logits)
    places = by_hand(logits)
    expected = np.array(
        [[places[0, 0:2].sum(), places[0, 3:5].sum(), 0], [places[1, 0], places[1, 2], places[1, 4:6].sum()]]
    )
    np.testing.assert_allclose(total.numpy(), expected, rtol=1e-14)
    assert torch.equal(lengths, LENGTHS.double())
    assert torch.equal(sequence_sums(torch.ones(2, 6), SEGMENTS, 3), LENGTHS.double())


def test_the_gradient_of_a_sequence_reaches_its_own_places_only() -> None:
    logits = logits_of(2).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: of_sequences(x)[0], (logits,))
    total, _ = of_sequences(logits)
    (gradient,) = torch.autograd.grad(total[1, 2], logits)
    touched = gradient.abs().sum(-1) > 0
    assert torch.equal(touched, torch.tensor([[False] * 6, [False, False, False, False, True, True]]))


def test_ranks_that_share_rows_get_the_sum_and_each_the_gradient_of_its_own_part_once(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    whole = logits_of(3).requires_grad_()
    total, _ = of_sequences(whole)
    (total.square().sum()).backward()

    def work(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        own = slice(3 * rank, 3 * rank + 3)
        part = logits_of(3)[:, own].requires_grad_()
        total, lengths = of_sequences(part, own, dist.group.WORLD)
        (total.square().sum()).backward()
        assert part.grad is not None
        return total.detach(), lengths, part.grad

    results = in_processes(tmp_path_factory.mktemp("ranks"), work, 2)
    for found, lengths, _ in results:
        torch.testing.assert_close(found, total.detach(), rtol=1e-14, atol=0)
        assert torch.equal(lengths, LENGTHS.double())
    assert whole.grad is not None
    torch.testing.assert_close(
        torch.cat([gradient for _, _, gradient in results], dim=1), whole.grad, rtol=1e-13, atol=1e-15
    )
