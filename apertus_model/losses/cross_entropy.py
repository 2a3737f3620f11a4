"""Fused linear cross-entropy: the loss or log-probabilities, from hidden states and the output weight.

Logits are made for `CHUNK_TOKENS` labelled tokens at a time, used and dropped, forward and backward. For N
labelled tokens, width D, V local words of the vocabulary, and parameters of b bytes (b = 4 for float32, 2 for
bfloat16), the largest extra memory is, in bytes,

    C V (4 + b') + V D (4 + b) + 4 C D + N D b    with C = min(N, CHUNK_TOKENS), b' = 0 for float32, else b

    (a chunk's logits; on CUDA, C V b) + (the weight's gradient, summed in float32; then in the dtype of the
    parameters) + (copies of a chunk) + (the states' gradient)

compared with 12 N V (+ V D b) for cross-entropy of full logits. For the 8B model and 4,096 tokens in
bfloat16 on CUDA: 0.3 + 3.2 GB instead of 6.4 + 1.1 GB; for 16,384 tokens the same instead of 25.8 + 1.1 GB.

`cross_entropy` knows the gradient of each token while it has the logits, and computes both gradients in the
forward pass: three matrix products per chunk, as with full logits. Any function may follow `label_scores` and
`log_probabilities`: their backward pass computes the logits a second time, which makes four products.

Shape suffixes: B batch, L local sequence, N tokens, C tokens of a chunk, D width, V local vocabulary.

Invariants:
- Logits and the gradient of the states have the dtype of the parameters; softmax, logarithms, losses and the
  sum of the weight's gradient over chunks are float32 (float64 for float64 parameters). Losses are summed in
  float64.
- `CHUNK_TOKENS` is a constant, since the order of sums depends on it: no setting of a run changes bits
  through it.
- `log_probabilities` never mixes rows in a chunk: the values of a row have the same bits in any batch, with
  or without gradients.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from apertus_model.device import has_kernels
from apertus_model.losses.softmax import row_sums, to_gradient
from specs.capabilities import CHUNK_TOKENS

IGNORE_INDEX = -100


@dataclass(frozen=True)
class VocabShard:
    """This rank's part of the vocabulary: the words of its rows of the output weight.

    Every rank of the group has all tokens. Each gets all losses, and the gradient of its own rows."""

    begin: int = 0  # the word of the first row
    # the ranks that share the vocabulary; None: this rank has all words
    group: dist.ProcessGroup | None = None

    def reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        """Reduces `values` over the group, in place."""
        if self.group is not None:
            dist.all_reduce(values, operation, group=self.group)
        return values


FULL_VOCAB = VocabShard()


class LastStates(NamedTuple):
    """The last hidden states of rows, the weight that makes logits of them, and the labels.

    With a part of the vocabulary, the gradient of `hidden_BLD` is that part's; the caller adds them up."""

    hidden_BLD: Tensor  # (batch, length, width), any floating dtype
    weight_VD: Tensor  # (words, width), same dtype
    # (batch, length) int64, on the host or on the device of the states (then the host waits for the number of
    # labels); ignored ones (-100) do not count
    labels_BL: Tensor
    vocab: VocabShard = FULL_VOCAB  # the words that the rows of the weight stand for


def cross_entropy(
    states: LastStates, denominator: Tensor | float, weights_BL: Tensor | None = None, z_loss: float = 0.0
) -> Tensor:
    """sum_i w_i (-ln p(label_i) + z_loss (ln Z_i)^2) / denominator, a scalar in nats; p = exp(logits) / Z =
    softmax(weight hidden). float32 (float64 for float64 parameters).

    Divided by the sum of the weights of a whole step (the number of its kept tokens), it is this
    micro-batch's share of the step's loss.

    Args:
        states: the states and their labels.
        denominator: scalar.
        weights_BL: of the labels, (batch, length); 1 by default. Those of ignored labels do not count.
        z_loss: weight of the squares of ln Z (PaLM, arXiv 2204.02311, section 5).
    """
    hidden_BLD, weight_VD, labels_BL, vocab = states
    weights = hidden_BLD.new_ones(labels_BL.shape, dtype=torch.float32) if weights_BL is None else weights_BL
    states_ND, labels = hidden_BLD.flatten(0, 1), labels_BL.reshape(1, -1)
    return _CrossEntropy.apply(states_ND, weight_VD, labels, weights.flatten(), denominator, vocab, z_loss)


def log_probabilities(states: LastStates) -> Tensor:
    """ln p(label), 0 for an ignored label: (batch, length), float32 (float64 for float64 parameters)."""
    return label_scores(states)[0]


def label_scores(states: LastStates) -> tuple[Tensor, Tensor]:
    """`log_probabilities`, and the logarithm of the sum of the exponentials of all logits, of the same shape.
    Their sum is the label's logit."""
    hidden_BLD, weight_VD, labels_BL, vocab = states
    log_p, log_sums = _LabelScores.apply(hidden_BLD.flatten(0, 1), weight_VD, labels_BL, vocab)
    return log_p.view(labels_BL.shape), log_sums.view(labels_BL.shape)


def total_weight(labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Sum of the weights of the labels that count, a float64 scalar; their number without weights."""
    kept = labels != IGNORE_INDEX
    return kept.sum().double() if weights is None else torch.where(kept, weights.double(), 0.0).sum()


def chunks(labels_BL: Tensor, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields (positions in the flattened batch, labels at these positions) of kept labels, at most
    `CHUNK_TOKENS` of one row at a time, on `device`."""
    kept = labels_BL != IGNORE_INDEX
    places = kept.flatten().nonzero().squeeze(1)
    labels = labels_BL.flatten()[places].to(device, non_blocking=True)
    per_row = kept.sum(1).tolist()
    places = places.to(device, non_blocking=True)
    for row, row_labels in zip(places.split(per_row), labels.split(per_row), strict=True):
        if len(row):
            yield from zip(row.split(CHUNK_TOKENS), row_labels.split(CHUNK_TOKENS), strict=True)


def precision(dtype: torch.dtype) -> torch.dtype:
    """The dtype of softmax and sums, for parameters of `dtype`."""
    return torch.promote_types(dtype, torch.float32)


def logits(states_CD: Tensor, weight_VD: Tensor) -> Tensor:
    """The logits (C, V), computed in the dtype of the parameters and returned in the precision of sums."""
    return F.linear(states_CD, weight_VD).to(precision(weight_VD.dtype))


class Softmax:
    """The softmax of a chunk."""

    log_probabilities_C: Tensor  # ln p(label)
    log_sum_C: Tensor  # logarithms of the sums of exp(logit) over the vocabulary

    def __init__(self, logits_CV: Tensor, labels_C: Tensor, vocab: VocabShard) -> None:
        """`logits_CV`: contiguous; overwritten. Kernels read them as they are, formulas in the precision of
        sums."""
        if not has_kernels(logits_CV):
            logits_CV = logits_CV.to(precision(logits_CV.dtype))
        self._logits_CV, self._own_C = logits_CV, labels_C - vocab.begin
        words = logits_CV.shape[1]
        inside_C = (self._own_C >= 0) & (self._own_C < words)
        label_C1 = (self._own_C if vocab.group is None else self._own_C.clamp(0, words - 1))[:, None]
        at_label_C = logits_CV.gather(1, label_C1)[:, 0]
        self._own_largest_C, total_C = row_sums(logits_CV)
        largest_C = vocab.reduce(self._own_largest_C.clone(), dist.ReduceOp.MAX)
        scale_C = (self._own_largest_C - largest_C).exp()
        at_label_C = torch.where(inside_C, at_label_C - largest_C, 0.0)
        sums_2C = vocab.reduce(torch.stack([total_C * scale_C, at_label_C]), dist.ReduceOp.SUM)
        total_C, at_label_C = sums_2C.unbind()
        log_total_C = total_C.log()
        self._total_C = total_C / scale_C  # of exp(logit - this rank's largest logit), over all ranks
        self.log_probabilities_C = at_label_C - log_total_C
        self.log_sum_C = largest_C + log_total_C

    def gradient(self, factors_C: Tensor, at_label_C: Tensor | None = None) -> Tensor:
        """Gradient of sum_i factor_i (-ln p(label_i)) with respect to the logits, factor (p - [label]): (C,
        V); overwrites the logits. With `at_label_C`, the gradient is factor p - at_label [label]."""
        at_label_C = factors_C if at_label_C is None else at_label_C
        shares_C = factors_C / self._total_C
        to_gradient(self._logits_CV, self._own_C, self._own_largest_C, shares_C, at_label_C)
        return self._logits_CV


class Gradients:
    """Gradients of states and weight, summed chunk by chunk; None where autograd needs none."""

    def __init__(self, states_ND: Tensor, weight_VD: Tensor, needed: tuple[bool, ...]) -> None:
        self.states_ND = torch.zeros_like(states_ND) if needed[0] else None
        self.weight_VD = torch.zeros_like(weight_VD, dtype=precision(weight_VD.dtype)) if needed[1] else None

    def add(self, places_C: Tensor, states_CD: Tensor, weight_VD: Tensor, logits_CV: Tensor) -> None:
        """Adds the gradient with respect to a chunk's logits, in float32 (float64)."""
        rounded_CV = logits_CV.to(weight_VD.dtype)
        if self.states_ND is not None:
            self.states_ND[places_C] = rounded_CV @ weight_VD
        if self.weight_VD is None:
            return
        # tensor cores sum in float32; elsewhere, factors and sums must have the same dtype
        if weight_VD.is_cuda and self.weight_VD.dtype != weight_VD.dtype:
            torch.addmm(
                self.weight_VD, rounded_CV.T, states_CD, out_dtype=self.weight_VD.dtype, out=self.weight_VD
            )
        else:
            self.weight_VD.addmm_(logits_CV.T, states_CD.to(self.weight_VD.dtype))

    def scaled(self, factor: Tensor, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """The gradients times `factor`; that of the weight in `dtype`."""
        states, weight = self.states_ND, self.weight_VD
        if states is not None:
            states = states * factor
        if weight is not None:  # scaled and rounded in one pass
            weight = torch.mul(weight, factor, out=torch.empty_like(weight, dtype=dtype))
        return states, weight


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states_ND: Tensor,
        weight_VD: Tensor,
        labels_BL: Tensor,
        weights_N: Tensor,
        denominator: Tensor | float,
        vocab: VocabShard,
        z_loss: float,
    ) -> Tensor:
        gradients = Gradients(states_ND, weight_VD, ctx.needs_input_grad)
        total = torch.zeros((), dtype=torch.float64, device=states_ND.device)
        for places, labels in chunks(labels_BL, states_ND.device):
            states, weights = states_ND[places], weights_N[places]
            softmax = Softmax(F.linear(states, weight_VD), labels, vocab)
            total -= (weights.double() * softmax.log_probabilities_C).sum()
            if z_loss:
                total += z_loss * (weights.double() * softmax.log_sum_C.double().square()).sum()
            if any(ctx.needs_input_grad[:2]):
                factors = (weights.double() / denominator).to(softmax.log_sum_C.dtype)
                of_all = factors * (1 + 2 * z_loss * softmax.log_sum_C) if z_loss else factors
                gradients.add(places, states, weight_VD, softmax.gradient(of_all, factors))
            del softmax  # before the next chunk's is made
        ctx.gradients, ctx.dtype = gradients, weight_VD.dtype
        return (total / denominator).to(precision(weight_VD.dtype))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.gradients.scaled(upstream[0], ctx.dtype), None, None, None, None, None


class _LabelScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states_ND: Tensor, weight_VD: Tensor, labels_BL: Tensor, vocab: VocabShard
    ) -> tuple[Tensor, Tensor]:
        empty = torch.zeros(len(states_ND), dtype=precision(weight_VD.dtype), device=states_ND.device)
        log_probabilities, log_sums = empty, torch.zeros_like(empty)
        for places, labels in chunks(labels_BL, states_ND.device):
            softmax = Softmax(F.linear(states_ND[places], weight_VD), labels, vocab)
            log_probabilities[places], log_sums[places] = softmax.log_probabilities_C, softmax.log_sum_C
            del softmax  # before the next chunk's is made
        ctx.save_for_backward(states_ND, weight_VD, labels_BL)
        ctx.vocab = vocab
        return log_probabilities, log_sums

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        states_ND, weight_VD, labels_BL = ctx.saved_tensors
        gradients = Gradients(states_ND, weight_VD, ctx.needs_input_grad)
        for places, labels in chunks(labels_BL, states_ND.device):
            states = states_ND[places]
            softmax = Softmax(F.linear(states, weight_VD), labels, ctx.vocab)
            of_label, of_sum = (gradient[places] for gradient in upstream)
            gradients.add(places, states, weight_VD, softmax.gradient(of_sum - of_label, -of_label))
            del softmax
        weight = gradients.weight_VD
        return gradients.states_ND, None if weight is None else weight.to(weight_VD.dtype), None, None
