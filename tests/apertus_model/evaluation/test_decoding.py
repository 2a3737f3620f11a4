"""Drawn tokens beside transformers' own warpers."""

from __future__ import annotations

import pytest
import torch

from apertus_model.evaluation.decoding import greedy, nucleus

DRAWS = 10_000
FIVE_SIGMA = 5.0


def logits(rows: int = 3, words: int = 40) -> torch.Tensor:
    return 3 * torch.randn(rows, words, generator=torch.Generator().manual_seed(2))


def warped(scores: torch.Tensor, top_p: float, temperature: float) -> torch.Tensor:
    """The distribution from which transformers' `generate` samples."""
    from transformers import TemperatureLogitsWarper, TopPLogitsWarper

    tokens = torch.zeros(len(scores), 1, dtype=torch.int64)
    scores = TemperatureLogitsWarper(temperature)(tokens, scores.double())
    return TopPLogitsWarper(top_p)(tokens, scores).softmax(-1)


@pytest.mark.parametrize(
    ("top_p", "temperature"), [(0.9, 1.0), (0.5, 1.0), (0.9, 0.3), (1e-6, 1.0), (1.0, 2.0)]
)
def test_draws_have_the_distribution_of_transformers_and_nothing_outside_its_nucleus(
    top_p: float, temperature: float
) -> None:
    choose = nucleus(top_p, temperature, seed=7, length=DRAWS)
    for row, scores in enumerate(logits()):
        expected = warped(scores[None], top_p, temperature)[0]
        drawn = choose(scores.expand(DRAWS, -1), torch.arange(DRAWS) + row * DRAWS, 3)
        shares = torch.bincount(drawn, minlength=len(scores)).double() / DRAWS
        assert not shares[expected == 0].any()
        deviation = (expected * (1 - expected) / DRAWS).sqrt()
        assert ((shares - expected).abs() <= FIVE_SIGMA * deviation + 1e-12).all()


def test_a_draw_depends_on_seed_row_and_step_and_not_on_the_batch() -> None:
    scores, numbers = logits(rows=200).mul_(0.1), torch.arange(200) * 3
    choose = nucleus(1.0, 1.0, seed=1, length=5)
    drawn = choose(scores, numbers, 2)
    backwards = [choose(scores[row, None], numbers[row, None], 2) for row in reversed(range(200))]
    assert torch.equal(drawn, torch.cat(backwards).flip(0))
    for other in (
        nucleus(1.0, 1.0, seed=2, length=5)(scores, numbers, 2),
        choose(scores, numbers, 3),
        choose(scores, numbers + 1, 2),
    ):
        assert (other == drawn).float().mean() < 0.2


def test_greedy_is_the_most_likely_token() -> None:
    assert torch.equal(greedy(logits(), torch.arange(3), 0), logits().argmax(-1))
