"""Labels drawn from a model's distribution, against that distribution; and that a draw does not depend on
what it should not."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import pytest
import torch

from apertus_model.losses import drawn_labels as module
from apertus_model.losses.cross_entropy import IGNORE_INDEX, LastStates, VocabShard
from apertus_model.losses.drawn_labels import draw_labels, gumbel
from tests.apertus_model.live_memory import LiveMemory
from tests.apertus_model.ranks import in_processes
from tests.machine import slow
from tests.numerics import Numerics

Tensor = torch.Tensor
FIVE_SIGMA = 5.0
FEW, MANY = 40_000, 100_000  # draws


def problem(
    shape: tuple[int, int, int, int] = (2, 40, 3, 11), dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states (B, L, D), weight (V, D), labels with a third ignored and the numbers of the places
    (B, L)."""
    batch, length, width, words = shape
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(batch, length, width, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(words, width, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(words, (batch, length), generator=generator)
    labels[torch.rand(batch, length, generator=generator) < 1 / 3] = IGNORE_INDEX
    return hidden, weight, labels, torch.arange(batch * length).view(batch, length)


@cache
def many(words: int, places: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draws (places,) at as many places of one and the same state, and the softmax there (words,)."""
    generator = torch.Generator().manual_seed(5)
    state = torch.randn(1, 1, 4, generator=generator)
    weight = 0.8 * torch.randn(words, 4, generator=generator)
    numbers = torch.arange(places)[None]
    drawn = draw_labels(
        LastStates(state.expand(1, places, 4), weight, torch.zeros_like(numbers)), numbers, seed
    )
    return drawn[0], (weight.double() @ state[0, 0].double()).softmax(0)


def excess(counts: Tensor, probabilities: Tensor) -> float:
    """Pearson's chi-square, in standard deviations above what is expected."""
    expected = counts.sum() * probabilities
    assert expected.min() > 5
    freedom = len(counts) - 1
    return (((counts - expected) ** 2 / expected).sum().item() - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize(
    ("words", "seed", "draws"),
    [
        (2, 1, FEW),
        (30, -77, FEW),
        *(slow(*problem, MANY) for problem in ((2, 1), (30, 0), (30, -77), (300, 123456))),
    ],
)
def test_words_are_drawn_as_often_as_the_softmax_says(
    words: int, seed: int, draws: int, numerics: Numerics
) -> None:
    drawn, probabilities = many(words, draws, seed)
    numerics(
        "losses",
        "frequencies of drawn labels, chi-square, in standard deviations from its mean",
        source="Gumbel-max with hashed noise; arXiv 2305.14342, algorithm 2",
        against="softmax in float64",
        difference=abs(excess(drawn.bincount(minlength=words).double(), probabilities)),
        allowed=FIVE_SIGMA,
    )


@pytest.mark.parametrize("seeds", [200, slow(1000)])
def test_a_place_does_not_favour_the_word_of_its_own_number(seeds: int) -> None:
    state, weight, numbers = torch.ones(1, 40, 1), torch.zeros(40, 1), torch.arange(40)[None]
    same = sum(
        int((draw_labels(LastStates(state, weight, numbers), numbers, seed) == numbers).sum())
        for seed in range(seeds)
    )
    assert abs(same - seeds) < FIVE_SIGMA * math.sqrt(seeds * 39 / 40)


@pytest.mark.parametrize("draws", [FEW, slow(MANY)])
@pytest.mark.parametrize("other", ["next place", "place of a row later", "other step"])
def test_draws_of_different_places_and_steps_are_independent(other: str, draws: int) -> None:
    drawn, probabilities = many(6, draws, 9)
    second = {
        "next place": drawn.roll(-1),
        "place of a row later": drawn.roll(-4096),
        "other step": many(6, draws, 10)[0],
    }[other]
    pairs = (drawn * 6 + second).bincount(minlength=36).double()
    assert abs(excess(pairs, torch.outer(probabilities, probabilities).flatten())) < FIVE_SIGMA


def test_the_noise_is_standard_gumbel() -> None:
    noise = gumbel(torch.arange(1_000_000, dtype=torch.int32), torch.float32).double()
    assert noise.isfinite().all()
    cumulative = (-(-noise.sort().values).exp()).exp()  # exp(-exp(-x))
    distance = (cumulative - (torch.arange(1_000_000) + 0.5) / 1_000_000).abs().max().item()
    assert distance < 1.95 / 1000  # Kolmogorov: exceeded once in a thousand samples
    extremes = torch.tensor([0, -1], dtype=torch.int32)
    assert not gumbel(extremes, torch.float32).isnan().any()


def test_a_draw_does_not_depend_on_batch_or_order_or_on_how_many_are_drawn_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hidden, weight, labels, places = problem()
    together = draw_labels(LastStates(hidden, weight, labels), places, 4)
    assert torch.equal(together == IGNORE_INDEX, labels == IGNORE_INDEX)
    monkeypatch.setattr(module, "PLACES", 7)
    order = [1, 0]
    assert torch.equal(
        draw_labels(LastStates(hidden[order], weight, labels[order]), places[order], 4), together[order]
    )
    half = slice(20, 40)
    assert torch.equal(
        draw_labels(LastStates(hidden[:, half], weight, labels[:, half]), places[:, half], 4),
        together[:, half],
    )
    assert not torch.equal(draw_labels(LastStates(hidden, weight, labels), places, 5), together)


def test_ranks_that_share_the_vocabulary_draw_what_one_rank_draws(tmp_path: Path) -> None:
    hidden, weight, labels, places = problem()
    nothing = torch.full_like(labels, IGNORE_INDEX)

    def work(rank: int) -> list[Tensor]:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        words = slice(0, 6) if rank == 0 else slice(6, 11)
        vocabulary = VocabShard(words.start, dist.group.WORLD)
        return [
            draw_labels(LastStates(hidden, weight[words], kept, vocabulary), places, 4)
            for kept in (labels, nothing)
        ]

    expected = [draw_labels(LastStates(hidden, weight, labels), places, 4), nothing]
    for result in in_processes(tmp_path, work, 2):
        assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_has_tokens_times_vocabulary_elements_and_the_peak_is_the_stated_one(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PLACES", 32)
    hidden, weight, labels, places = problem((2, 512, 16, 2000), dtype)
    with LiveMemory() as memory:
        draw_labels(LastStates(hidden, weight, labels), places, 0)
    assert memory.largest == 32 * 2000
    stated = 32 * 2000 * (16 + weight.element_size())
    per_token, per_word = 8 * 6 * labels.numel(), 12 * 2000
    assert 0.6 * stated < memory.peak < stated + per_token + per_word
