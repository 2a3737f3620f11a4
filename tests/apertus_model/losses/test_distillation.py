"""The loss is its formula, in float64, over full logits; its gradients are those of autograd on it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from apertus_model.losses import cross_entropy as chunked
from apertus_model.losses.cross_entropy import FULL_VOCAB, LastStates, VocabShard
from apertus_model.losses.distillation import (
    StoredTeacher,
    Teacher,
    WholeTeacher,
    distillation,
    top_tokens,
)
from specs.stages.distill import DistillLoss
from tests.apertus_model.ranks import in_processes

ROWS, LENGTH, WORDS, WIDTH, TEACHER_WIDTH = 2, 6, 16, 5, 7
SETTINGS = [
    DistillLoss(direction=direction, temperature=temperature, weight=weight)
    for direction in ("forward", "reverse")
    for temperature, weight in ((1.0, 1.0), (2.5, 0.7))
]  # fmt: skip


class Case:
    """States, weights and labels of a student and a teacher, some labels ignored."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        random = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)

        self.hidden, self.weight = draw(ROWS, LENGTH, WIDTH), draw(WORDS, WIDTH)
        self.states, self.rows = draw(ROWS, LENGTH, TEACHER_WIDTH), draw(WORDS, TEACHER_WIDTH)
        self.labels = torch.randint(0, WORDS, (ROWS, LENGTH), generator=random)
        self.labels[0, 2] = self.labels[1, 4] = -100

    def whole(self, temperature: float) -> WholeTeacher:
        return WholeTeacher(self.states.flatten(0, 1), self.rows, temperature)

    def stored(self, k: int, temperature: float) -> StoredTeacher:
        words, log_p = top_tokens(LastStates(self.states, self.rows, self.labels), k, temperature)
        return StoredTeacher(words.flatten(0, 1), log_p.flatten(0, 1))

    def found(
        self, teacher: Teacher, settings: DistillLoss, z_loss: float = 0.0, vocab: VocabShard = FULL_VOCAB
    ) -> tuple[torch.Tensor, ...]:
        """Loss, its gradients, and the sums."""
        inputs = self.hidden.clone().requires_grad_(), self.weight.clone().requires_grad_()
        loss, sums = distillation(LastStates(*inputs, self.labels, vocab), 7.0, teacher, settings, z_loss)
        return loss.detach(), *torch.autograd.grad(3 * loss, inputs), sums

    def expected(
        self, settings: DistillLoss, z_loss: float = 0.0, k: int | None = None
    ) -> tuple[torch.Tensor, ...]:
        """The same by autograd over full logits. With `k`, words that the teacher finds less likely than its
        k first ones are one outcome."""
        hidden, weight = self.hidden.double().requires_grad_(), self.weight.double().requires_grad_()
        kept = self.labels != -100
        student, teacher = (hidden @ weight.T)[kept], (self.states.double() @ self.rows.double().T)[kept]
        t, w = settings.temperature, settings.weight
        p, q = (teacher / t).softmax(-1), (student / t).softmax(-1)
        if k is not None:
            order = teacher.argsort(-1, descending=True)
            p, q = (
                torch.cat([x.gather(1, order[:, :k]), x.gather(1, order[:, k:]).sum(1, keepdim=True)], 1)
                for x in (p, q)
            )
        forward, reverse = (p * (p / q).log()).sum(-1), (q * (q / p).log()).sum(-1)
        divergence = forward if settings.direction == "forward" else reverse
        ce = F.cross_entropy(student, self.labels[kept], reduction="none")
        losses = w * t**2 * divergence + (1 - w) * ce + z_loss * student.logsumexp(-1).square()
        loss = losses.sum() / 7
        sums = torch.stack([divergence.sum(), ce.sum()]).detach()
        return loss.detach(), *torch.autograd.grad(3 * loss, (hidden, weight)), sums


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "CHUNK_TOKENS", 4)


def close(
    found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], tolerance: float = 1e-12
) -> None:
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own.double(), other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_loss_and_gradients_are_the_formula(settings: DistillLoss, z_loss: float) -> None:
    case = Case()
    close(
        case.found(case.whole(settings.temperature), settings, z_loss=z_loss), case.expected(settings, z_loss)
    )


def test_the_mean_over_tokens_is_that_of_kl_div() -> None:
    """`kl_div` with reduction "batchmean" divides by rows; over flattened tokens, these are the tokens."""
    case, kept = Case(), Case().labels != -100
    student, teacher = (case.hidden @ case.weight.T)[kept], (case.states @ case.rows.T)[kept]
    whole = case.whole(1.0)
    for direction, pair in (("forward", (student, teacher)), ("reverse", (teacher, student))):
        loss, _ = distillation(
            LastStates(case.hidden, case.weight, case.labels),
            kept.sum(),
            whole,
            DistillLoss(direction=direction),
        )
        own, other = (logits.log_softmax(-1) for logits in pair)
        expected = F.kl_div(own, other, reduction="batchmean", log_target=True)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_words_that_are_not_stored_are_one_outcome(settings: DistillLoss) -> None:
    """What is stored is float32."""
    case = Case()
    found = case.found(case.stored(3, settings.temperature), settings)
    close(found, case.expected(settings, k=3), 1e-5)
    whole = case.found(case.whole(settings.temperature), settings)
    assert found[-1][0] < whole[-1][0], "outcomes that are joined diverge less"


@pytest.mark.parametrize("settings", SETTINGS[::2], ids=str)
def test_a_student_that_equals_its_teacher_loses_nothing(settings: DistillLoss) -> None:
    case = Case()
    case.states, case.rows = case.hidden, case.weight
    for teacher in (case.whole(1.0), case.stored(3, 1.0)):
        loss, states, weight, _ = case.found(teacher, settings)
        assert max(abs(loss), states.abs().max(), weight.abs().max()) < 1e-6


def test_bfloat16_computes_in_float32() -> None:
    case, settings = Case(torch.bfloat16), SETTINGS[1]
    loss, states, _, _ = case.found(case.whole(settings.temperature), settings)
    expected = case.expected(settings)
    assert loss.dtype == torch.float32 and states.dtype == torch.bfloat16
    assert loss.item() == pytest.approx(expected[0].item(), rel=5e-3)
    torch.testing.assert_close(states.double(), expected[1], rtol=0.05, atol=0.02)


def _of_rank(rank: int) -> list[tuple[torch.Tensor, ...]]:
    dist.init_process_group("gloo", rank=rank, world_size=2)
    case, half = Case(), WORDS // 2
    vocab = VocabShard(half * rank, dist.group.WORLD)
    case.weight, case.rows = (all_[half * rank : half * (rank + 1)] for all_ in (case.weight, case.rows))
    results = []
    for settings in SETTINGS:
        words, log_p = top_tokens(
            LastStates(case.states, case.rows, case.labels, vocab), 3, settings.temperature
        )
        stored = StoredTeacher(words.flatten(0, 1), log_p.flatten(0, 1))
        for teacher in (case.whole(settings.temperature), stored):
            results.append(case.found(teacher, settings, vocab=vocab))
    return results


def test_ranks_that_share_the_vocabulary_find_the_same(tmp_path: Path) -> None:
    first, second = in_processes(tmp_path, _of_rank, 2)
    case, expected = Case(), []
    for settings in SETTINGS:
        for teacher in (case.whole(settings.temperature), case.stored(3, settings.temperature)):
            expected.append(case.found(teacher, settings))
    for own, other, whole in zip(first, second, expected, strict=True):
        assert own[0] == other[0] and torch.equal(own[-1], other[-1])
        shared = (own[0], own[1] + other[1], torch.cat([own[2], other[2]]), own[-1])
        close(shared, whole, 1e-6)
