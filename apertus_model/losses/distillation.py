"""The divergence between the predictions of two models; distillation, which makes it the loss of a student.

With temperature T, p = softmax(teacher's logits / T) and q = softmax(student's logits / T), the divergence of
a token is

    forward   KL(p || q) = sum_v p_v (ln p_v - ln q_v)      reverse   KL(q || p) = sum_v q_v (ln q_v - ln p_v)

and its loss is w T^2 KL + (1 - w) ce + z_loss (ln Z)^2, where ce is the cross-entropy of the label and Z the
sum of exp(logits), both at temperature 1. T^2 keeps the size of the gradient, which is T (q - p) forward and
T q (ln q - ln p - KL) reverse (Hinton et al., arXiv 1503.02531).

A teacher whose k most likely words of each token are stored (`top_tokens`) has one more probability, that of
all other words together. The divergence is then that of k + 1 outcomes. It is at most that of the whole
vocabulary, and 0 for a student that equals its teacher.

As in `cross_entropy`, logits of both models exist for `CHUNK_TOKENS` labelled tokens at a time, and gradients
are computed in the forward pass: with V words of the student, a chunk holds four (C, V) tensors in the
precision of sums.

Shape suffixes as in `cross_entropy`, and K stored words.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from apertus_model.collectives import gathered
from apertus_model.losses.cross_entropy import (
    Gradients,
    LastStates,
    Softmax,
    VocabShard,
    chunks,
    logits,
    precision,
)
from specs.capabilities import CHUNK_TOKENS
from specs.stages.distill import DistillLoss

_CHUNK_ELEMENTS = 1 << 24  # bounds the float64 temporaries of `kl_divergence` to a few of 128 MiB


@dataclass(frozen=True)
class WholeTeacher:
    """The last hidden states of a model and this rank's rows of its output weight."""

    states_ND: torch.Tensor
    weight_VD: torch.Tensor
    temperature: float

    def divergences(
        self, places_C: torch.Tensor, log_q_CV: torch.Tensor, *, reverse: bool, vocab: VocabShard
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The divergence at each place, (C,), the same on all ranks that share the vocabulary; and its
        gradient with respect to the student's logits / T, (C, V). `places_C`: indices into the flattened
        batch; `log_q_CV`: ln q of this rank's words, overwritten; `reverse`: KL(q || p)."""
        log_p_CV = log_softmax(logits(self.states_ND[places_C], self.weight_VD) / self.temperature, vocab)
        if reverse:
            ratio_CV = log_p_CV.neg_().add_(log_q_CV)
            q_CV = log_q_CV.exp_()
            divergence_C = vocab.reduce((q_CV * ratio_CV).sum(1), dist.ReduceOp.SUM)
            return divergence_C, ratio_CV.sub_(divergence_C[:, None]).mul_(q_CV)
        p_CV = log_p_CV.exp()
        divergence_C = vocab.reduce(log_p_CV.sub_(log_q_CV).mul_(p_CV).sum(1), dist.ReduceOp.SUM)
        return divergence_C, log_q_CV.exp_().sub_(p_CV)


@dataclass(frozen=True)
class StoredTeacher:
    """The most likely words of each token and their ln p; after these, ln p of all other words together."""

    words_NK: torch.Tensor  # int32, ids in the whole vocabulary
    log_p_NK1: torch.Tensor

    def divergences(
        self, places_C: torch.Tensor, log_q_CV: torch.Tensor, *, reverse: bool, vocab: VocabShard
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `WholeTeacher.divergences`."""
        words = log_q_CV.shape[1]
        own_CK = self.words_NK[places_C].long() - vocab.begin
        inside_CK = (own_CK >= 0) & (own_CK < words)
        at_CK = torch.where(inside_CK, own_CK, 0)
        log_q_CK = vocab.reduce(torch.where(inside_CK, log_q_CV.gather(1, at_CK), 0.0), dist.ReduceOp.SUM)
        q_CV = log_q_CV.exp_()
        # words of other ranks go into an extra column, which is dropped
        slot_CK = torch.where(inside_CK, own_CK, words)
        stored_CV = torch.zeros(len(q_CV), words + 1, dtype=torch.bool, device=q_CV.device)
        stored_CV = stored_CV.scatter_(1, slot_CK, True)[:, :words]
        q_rest_C = vocab.reduce(q_CV.masked_fill(stored_CV, 0.0).sum(1), dist.ReduceOp.SUM)
        log_q_CK1 = torch.cat([log_q_CK, q_rest_C.clamp(min=torch.finfo(q_CV.dtype).tiny).log()[:, None]], 1)
        log_p_CK1 = self.log_p_NK1[places_C].to(q_CV.dtype)
        ratio_CK1 = log_q_CK1 - log_p_CK1
        if reverse:
            divergence_C = (log_q_CK1.exp() * ratio_CK1).sum(1)
            factor_CV = ratio_CK1[:, -1:].repeat(1, words + 1)
            factor_CV = factor_CV.scatter_(1, slot_CK, ratio_CK1[:, :-1])[:, :words]
            return divergence_C, factor_CV.sub_(divergence_C[:, None]).mul_(q_CV)
        p_CK1 = log_p_CK1.exp()
        divergence_C = -(p_CK1 * ratio_CK1).sum(1)
        rest_C1 = 1 - (-ratio_CK1[:, -1:]).exp()
        gradient_CV = torch.where(stored_CV, q_CV, q_CV * rest_C1)
        return divergence_C, gradient_CV.scatter_add_(1, at_CK, torch.where(inside_CK, -p_CK1[:, :-1], 0.0))


Teacher = WholeTeacher | StoredTeacher


def distillation(
    states: LastStates,
    denominator: torch.Tensor | float,
    teacher: Teacher,
    settings: DistillLoss,
    z_loss: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the losses of the kept labels / denominator, a scalar in nats, float32 (float64 for float64
    parameters); and, without gradients, the sums of KL and of ce over these labels, float64 of shape (2,).

    Args:
        states: of the student.
        denominator: scalar; the number of kept labels of a whole step makes the loss a mean over tokens.
        teacher: the predictions for these tokens and words.
        settings: direction, temperature and weight.
        z_loss: as for `cross_entropy`.
    """
    hidden_BLD, weight_VD, labels_BL, vocab = states
    states_ND, labels = hidden_BLD.flatten(0, 1), labels_BL.reshape(1, -1)
    return _Distillation.apply(states_ND, weight_VD, labels, denominator, teacher, settings, vocab, z_loss)


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        labels_BL: torch.Tensor,
        denominator: torch.Tensor | float,
        teacher: Teacher,
        settings: DistillLoss,
        vocab: VocabShard,
        z_loss: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        gradients = Gradients(states_ND, weight_VD, ctx.needs_input_grad)
        sums = torch.zeros(2, dtype=torch.float64, device=states_ND.device)
        squares = torch.zeros((), dtype=torch.float64, device=states_ND.device)
        t, w = settings.temperature, settings.weight
        for places, labels in chunks(labels_BL, states_ND.device):
            states = states_ND[places]
            logits_CV = logits(states, weight_VD)
            divergence, gradient = teacher.divergences(
                places,
                log_softmax(logits_CV / t, vocab),
                reverse=settings.direction == "reverse",
                vocab=vocab,
            )
            softmax = Softmax(logits_CV, labels, vocab)
            sums += torch.stack([divergence.double().sum(), -softmax.log_probabilities_C.double().sum()])
            squares += softmax.log_sum_C.double().square().sum()
            if any(ctx.needs_input_grad[:2]):
                gradient *= w * t / denominator
                if w < 1 or z_loss:
                    of_all = (1 - w + 2 * z_loss * softmax.log_sum_C) / denominator
                    of_label = torch.full_like(of_all, 1 - w) / denominator
                    gradient += softmax.gradient(of_all.to(gradient.dtype), of_label.to(gradient.dtype))
                gradients.add(places, states, weight_VD, gradient)
            del logits_CV, softmax, gradient  # before the next chunk's are made
        ctx.gradients, ctx.dtype = gradients, weight_VD.dtype
        total = w * t**2 * sums[0] + (1 - w) * sums[1] + z_loss * squares
        ctx.mark_non_differentiable(sums)
        return (total / denominator).to(precision(weight_VD.dtype)), sums

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *ctx.gradients.scaled(upstream[0], ctx.dtype), None, None, None, None, None, None


@torch.no_grad()
def top_tokens(states: LastStates, k: int, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The k most likely words of every token under softmax(logits / temperature), (batch, length, k) int32,
    the most likely first; and their ln p, followed by that of all other words together, (batch, length, k +
    1) float32. k must be below the size of the vocabulary. A `StoredTeacher` reads these tensors."""
    hidden_BLD, weight_VD, _, vocab = states
    of_chunks = []
    for states_CD in hidden_BLD.flatten(0, 1).split(CHUNK_TOKENS):
        log_p_CV = log_softmax(logits(states_CD, weight_VD) / temperature, vocab)
        best_CK, at_CK = log_p_CV.topk(min(k, log_p_CV.shape[1]), 1)
        words_CK = at_CK + vocab.begin
        if vocab.group is not None:
            best_CK, chosen = gathered(best_CK, vocab.group, dim=1).topk(k, 1)
            words_CK = gathered(words_CK, vocab.group, dim=1).gather(1, chosen)
        own_CK = words_CK - vocab.begin
        slot_CK = torch.where((own_CK >= 0) & (own_CK < log_p_CV.shape[1]), own_CK, log_p_CV.shape[1])
        rest_CV = torch.nn.functional.pad(log_p_CV, (0, 1)).scatter_(1, slot_CK, -torch.inf)[:, :-1]
        largest_C = vocab.reduce(rest_CV.amax(1), dist.ReduceOp.MAX)
        total_C = vocab.reduce((rest_CV - largest_C[:, None]).exp().sum(1), dist.ReduceOp.SUM)
        log_p_CK1 = torch.cat([best_CK, (largest_C + total_C.log())[:, None]], 1)
        of_chunks.append((words_CK.to(torch.int32), log_p_CK1.to(torch.float32)))
    words, log_p = (
        torch.cat(parts).unflatten(0, hidden_BLD.shape[:2]) for parts in zip(*of_chunks, strict=True)
    )
    return words, log_p


def kl_divergence(logits: torch.Tensor, other_logits: torch.Tensor) -> torch.Tensor:
    """sum_i KL(p_i || q_i) in nats over the whole vocabulary, a float64 scalar; p = softmax(logits), q =
    softmax(other_logits), computed in float64. Both: (places, vocabulary), any floating dtype."""
    total = torch.zeros((), dtype=torch.float64, device=logits.device)
    places = max(1, _CHUNK_ELEMENTS // logits.shape[-1])
    for own, other in zip(logits.split(places), other_logits.split(places), strict=True):
        log_p, log_q = own.double().log_softmax(-1), other.double().log_softmax(-1)
        total += (log_p.exp() * (log_p - log_q)).sum()
    return total


def log_softmax(logits_CV: torch.Tensor, vocab: VocabShard) -> torch.Tensor:
    """The log-softmax over the whole vocabulary, for this rank's words; overwrites the logits."""
    logits_CV -= vocab.reduce(logits_CV.amax(1), dist.ReduceOp.MAX)[:, None]
    logits_CV -= vocab.reduce(logits_CV.exp().sum(1), dist.ReduceOp.SUM).log()[:, None]
    return logits_CV
