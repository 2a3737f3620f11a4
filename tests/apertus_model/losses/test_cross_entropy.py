"""Cross-entropy and log-probabilities chunk by chunk, against torch's log-softmax of all logits in
float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from apertus_model.losses import cross_entropy as module
from apertus_model.losses.cross_entropy import (
    IGNORE_INDEX,
    LastStates,
    VocabShard,
    cross_entropy,
    label_scores,
    log_probabilities,
    total_weight,
)
from tests.apertus_model.live_memory import LiveMemory
from tests.apertus_model.ranks import in_processes
from tests.numerics import Numerics, largest_difference

Problem = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture
def chunks_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return lambda tokens: monkeypatch.setattr(module, "CHUNK_TOKENS", tokens)


def problem(
    shape: tuple[int, int, int, int], *, kept: float = 0.8, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Problem:
    """Hidden states (B, L, D), weight (V, D), labels and their weights (B, L)."""
    batch, length, width, words = shape
    generator = torch.Generator().manual_seed(seed)
    hidden = (
        torch.randn(batch, length, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    )
    weight = torch.randn(words, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(words, (batch, length), generator=generator)
    labels[torch.rand(batch, length, generator=generator) >= kept] = IGNORE_INDEX
    return hidden, weight, labels, torch.rand(batch, length, generator=generator)


def all_at_once(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """ln p(label), 0 where it is ignored, in float64."""
    log_p = (hidden.double() @ weight.double().T).log_softmax(-1)
    return torch.where(labels >= 0, log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0], 0.0)


LOSS, LOG_P = "-sum w ln softmax(W h)[y] / sum w", "ln softmax(W h)[y]"
TRUTH = "log-softmax of all logits in float64"


def with_gradients(value: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    return [value.detach(), *torch.autograd.grad(value, (hidden, weight))]


SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 5), st.integers(2, 11))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=SHAPES,
    kept=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 99),
    chunk=st.integers(1, 30),
    weighted=st.booleans(),
    z_loss=st.sampled_from([0.0, 1e-4, 0.3]),
)
def test_loss_and_gradients_are_those_of_all_logits(
    chunks_of: Callable[[int], None],
    numerics: Numerics,
    shape: tuple[int, int, int, int],
    kept: float,
    seed: int,
    chunk: int,
    weighted: bool,
    z_loss: float,
) -> None:
    chunks_of(chunk)
    hidden, weight, labels, weights = problem(shape, kept=kept, seed=seed)
    used = weights.double() if weighted else torch.ones_like(weights.double())
    squares = (hidden @ weight.T).logsumexp(-1).square() * (labels >= 0)
    expected = 3 * ((z_loss * squares - all_at_once(hidden, weight, labels)) * used).sum() / 7
    stated = weights if weighted else None
    found = 3 * cross_entropy(LastStates(hidden, weight, labels), torch.tensor(7.0), stated, z_loss=z_loss)
    numerics(
        "losses",
        "cross-entropy by chunks, with gradients, float64, relative above 1",
        source=LOSS,
        against=f"{TRUTH}, hypothesis over shapes, chunks, weights and labels left out",
        difference=largest_difference(
            with_gradients(found, hidden, weight),
            with_gradients(expected, hidden, weight),
            relative_above=1.0,
        ),
        allowed=1e-13,
    )


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shape=SHAPES, kept=st.sampled_from([0.0, 0.3, 1.0]), seed=st.integers(0, 99), chunk=st.integers(1, 30))
def test_log_probabilities_and_gradients_of_any_function_of_them_are_those_of_all_logits(
    chunks_of: Callable[[int], None],
    numerics: Numerics,
    shape: tuple[int, int, int, int],
    kept: float,
    seed: int,
    chunk: int,
) -> None:
    chunks_of(chunk)
    hidden, weight, labels, weights = problem(shape, kept=kept, seed=seed)
    found, expected = (
        log_probabilities(LastStates(hidden, weight, labels)),
        all_at_once(hidden, weight, labels),
    )
    assert not found[labels < 0].any()
    truth = {"source": LOG_P, "against": f"{TRUTH}, hypothesis over shapes, chunks and labels left out"}
    numerics(
        "losses",
        "log-probabilities of labels by chunks, float64, relative above 1",
        **truth,
        difference=largest_difference(found, expected, relative_above=1.0),
        allowed=1e-13,
    )
    a, b = (with_gradients(((p - weights) ** 2).sum(), hidden, weight) for p in (found, expected))
    numerics(
        "losses",
        "gradients of a sum of squares of log-probabilities by chunks, float64, relative above 1",
        **truth,
        difference=largest_difference(a, b, relative_above=1.0),
        allowed=1e-12,
    )


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(shape=SHAPES, kept=st.sampled_from([0.3, 1.0]), seed=st.integers(0, 99), chunk=st.integers(1, 30))
def test_scores_and_gradients_of_any_function_of_them_are_those_of_all_logits(
    chunks_of: Callable[[int], None], shape: tuple[int, int, int, int], kept: float, seed: int, chunk: int
) -> None:
    chunks_of(chunk)
    hidden, weight, labels, weights = problem(shape, kept=kept, seed=seed)
    log_sums = torch.where(labels >= 0, (hidden @ weight.T).logsumexp(-1), 0.0)
    expected = all_at_once(hidden, weight, labels), log_sums
    found = label_scores(LastStates(hidden, weight, labels))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    a, b = (
        with_gradients((weights * (p + v).square() + (v * p).sin()).sum(), hidden, weight)
        for p, v in (found, expected)
    )
    for one, other in zip(a, b, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


PRECISIONS = [(torch.float32, 1e-6, 2e-6), (torch.bfloat16, 2e-3, 6e-3)]
"""dtype, relative error of the loss, and of the gradients (norm of the error over norm); bfloat16 has 8
bits: 2^-8 = 3.9e-3."""


@pytest.mark.parametrize(("dtype", "loss_error", "gradient_error"), PRECISIONS)
@pytest.mark.parametrize("chunk", [16, 512])
def test_rounding_is_that_of_the_parameters_whatever_the_number_of_chunks(
    chunks_of: Callable[[int], None],
    numerics: Numerics,
    dtype: torch.dtype,
    loss_error: float,
    gradient_error: float,
    chunk: int,
) -> None:
    """32 chunks are as exact as one: a sum of the weight's gradient in bfloat16 would be several times
    worse (see below)."""
    chunks_of(chunk)
    hidden, weight, labels, _ = problem((1, 512, 16, 64), dtype=dtype, kept=1.0)
    found = cross_entropy(LastStates(hidden, weight, labels), 512)
    loss, states, words = with_gradients(found, hidden, weight)
    expected = with_gradients(-all_at_once(hidden, weight, labels).sum() / 512, hidden, weight)
    exact = [value.double() for value in exact_gradients(hidden, weight, labels)]
    assert (loss.dtype, states.dtype, words.dtype) == (torch.float32, dtype, dtype)
    errors = {"loss": largest_difference(loss, expected[0], relative_above=0.0)}
    for name, value, truth in (("gradient by h", states, exact[0]), ("gradient by W", words, exact[1])):
        errors[f"{name} (norms)"] = ((value.double() - truth).norm() / truth.norm()).item()
    for name, error in errors.items():
        numerics(
            "losses",
            f"cross-entropy in one chunk and in 32, {str(dtype).removeprefix('torch.')}, {name}, relative",
            source=LOSS,
            against=TRUTH,
            difference=error,
            allowed=loss_error if name == "loss" else gradient_error,
        )
    if dtype == torch.bfloat16 and chunk == 16:
        summed = torch.zeros_like(weight)
        for part in range(0, 512, 16):
            piece = slice(part, part + 16)
            summed += torch.autograd.grad(
                cross_entropy(LastStates(hidden[:, piece], weight, labels[:, piece]), 512), weight
            )[0]
        worse = (summed.double() - exact[1]).norm() / exact[1].norm()
        assert worse > 2 * (words.double() - exact[1]).norm() / exact[1].norm()


def exact_gradients(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    states, words = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    return torch.autograd.grad(-all_at_once(states, words, labels).sum() / labels.numel(), (states, words))


def test_a_weight_that_rests_gets_no_gradient() -> None:
    hidden, weight, labels, _ = problem((1, 5, 3, 7))
    weight = weight.detach()
    cross_entropy(LastStates(hidden, weight, labels), 5.0).backward()
    log_probabilities(LastStates(hidden, weight, labels)).sum().backward()
    assert hidden.grad is not None and weight.grad is None


def test_without_a_kept_label_the_loss_and_all_gradients_are_zero() -> None:
    hidden, weight, labels, weights = problem((2, 4, 3, 5), kept=0.0)
    for value in (
        cross_entropy(LastStates(hidden, weight, labels), 9.0, weights),
        log_probabilities(LastStates(hidden, weight, labels)).sum(),
    ):
        assert [tensor.abs().sum().item() for tensor in with_gradients(value, hidden, weight)] == [
            0.0,
            0.0,
            0.0,
        ]


def test_a_row_has_the_same_bits_in_any_batch_with_and_without_gradients(
    chunks_of: Callable[[int], None],
) -> None:
    chunks_of(8)
    hidden, weight, labels, _ = problem((4, 21, 16, 50), dtype=torch.float32)
    together = log_probabilities(LastStates(hidden, weight, labels))
    with torch.no_grad():
        for order in ([3, 0, 2, 1], [2], [1, 1, 3]):
            assert torch.equal(
                log_probabilities(LastStates(hidden[order], weight, labels[order])), together[order]
            )


def test_a_label_outside_of_the_vocabulary_is_an_error() -> None:
    hidden, weight, labels, _ = problem((1, 5, 3, 7), kept=1.0)
    labels[0, 2] = 7
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        cross_entropy(LastStates(hidden, weight, labels), 5.0)


def test_weights_are_counted_where_labels_are_kept() -> None:
    labels = torch.tensor([[4, IGNORE_INDEX, 0], [IGNORE_INDEX, 2, IGNORE_INDEX]])
    weights = torch.tensor([[1.0, 5.0, 0.25], [7.0, 0.5, 7.0]])
    assert total_weight(labels).item() == 3.0
    assert total_weight(labels, weights).item() == 1.75
    assert total_weight(labels).dtype == total_weight(labels, weights).dtype == torch.float64


def test_ranks_that_share_the_vocabulary_get_the_whole_loss_and_their_part_of_the_gradients(
    tmp_path_factory: pytest.TempPathFactory, chunks_of: Callable[[int], None], numerics: Numerics
) -> None:
    chunks_of(4)
    hidden, weight, labels, weights = problem((2, 9, 3, 7))
    plain = with_gradients(
        cross_entropy(LastStates(hidden, weight, labels), 5.0, weights, z_loss=0.1), hidden, weight
    )
    squared = with_gradients(
        log_probabilities(LastStates(hidden, weight, labels)).square().sum(), hidden, weight
    )

    def work(rank: int) -> list[list[torch.Tensor]]:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        words = slice(0, 4) if rank == 0 else slice(4, 7)
        vocabulary = VocabShard(words.start, dist.group.WORLD)
        states, own, labels, weights = problem((2, 9, 3, 7))
        own = own.detach()[words].clone().requires_grad_()
        return [
            with_gradients(
                cross_entropy(LastStates(states, own, labels, vocabulary), 5.0, weights, 0.1), states, own
            ),
            with_gradients(
                log_probabilities(LastStates(states, own, labels, vocabulary)).square().sum(), states, own
            ),
        ]

    results = in_processes(tmp_path_factory.mktemp("ranks"), work, 2)
    for index, (value, of_states, of_weight) in enumerate((plain, squared)):
        first, second = (result[index] for result in results)
        assert torch.equal(first[0], second[0])
        found = [first[0], first[1] + second[1], torch.cat([first[2], second[2]])]
        numerics(
            "losses",
            f"{('cross-entropy', 'log-probabilities')[index]} of two processes that share the vocabulary,"
            " with gradients, float64, relative above 1",
            source=(LOSS, LOG_P)[index],
            against="one process",
            difference=largest_difference(found, [value, of_states, of_weight], relative_above=1.0),
            allowed=1e-14,
        )


def measured(compute: Callable[[], torch.Tensor]) -> LiveMemory:
    """What a forward and a backward pass allocate."""
    with LiveMemory() as memory:
        compute().backward()
    return memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loss", ["cross-entropy", "log-probabilities"])
def test_no_tensor_has_tokens_times_vocabulary_elements_and_the_peak_is_the_stated_one(
    chunks_of: Callable[[int], None], dtype: torch.dtype, loss: str
) -> None:
    chunks_of(64)
    hidden, weight, labels, _ = problem((2, 512, 16, 2000), dtype=dtype, kept=1.0)
    tokens, chunk, width, words, size = 1024, 64, 16, 2000, hidden.element_size()
    compute: dict[str, Callable[[], Any]] = {
        "cross-entropy": lambda: cross_entropy(LastStates(hidden, weight, labels), tokens),
        "log-probabilities": lambda: log_probabilities(LastStates(hidden, weight, labels)).sum(),
    }
    memory = measured(compute[loss])
    assert memory.largest == chunk * words
    rounded = 0 if dtype == torch.float32 else size
    stated = (
        chunk * words * (4 + rounded) + words * width * (4 + size) + 4 * chunk * width + tokens * width * size
    )
    per_token = 8 * 12 * tokens  # labels, places, log-probabilities and the like
    assert 0.7 * stated < memory.peak < stated + per_token
    full = measured(
        lambda: torch.nn.functional.cross_entropy((hidden @ weight.T).flatten(0, 1).float(), labels.flatten())
    )
    assert full.largest == tokens * words
    assert full.peak > 12 * tokens * words > 5 * memory.peak
