"""The divergence of two models, exact over the vocabulary."""

import pytest
import torch

from apertus_model.losses.distillation import kl_divergence


def logits_of(seed: int) -> torch.Tensor:
    return torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_divergence_is_exact_over_the_vocabulary() -> None:
    p, q = (torch.softmax(logits_of(seed).flatten(0, 1), -1) for seed in (6, 7))
    # torch's takes the logarithm of q first
    expected = torch.nn.functional.kl_div(q.log(), p, reduction="sum")
    found = kl_divergence(logits_of(6).flatten(0, 1), logits_of(7).flatten(0, 1))
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)
    assert kl_divergence(logits_of(6).flatten(0, 1), logits_of(6).flatten(0, 1) + 3).item() == pytest.approx(
        0, abs=1e-13
    )
