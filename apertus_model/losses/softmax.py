"""The softmax of rows of logits, and its gradient, as two operators that work in the memory of the logits.

On CUDA they run Triton's kernels: each operator reads the logits once, and the second overwrites them.
Elsewhere they run formulas: the first operator leaves exp(logit - largest) in place of the logits for the
second. Code that traces them, such as a rehearsal, sees each as one operator.

Shape suffixes: C rows, V words, which may be a part of the vocabulary.
"""

import torch
from torch import Tensor

from apertus_model.device import KERNEL_DTYPES


def formula(logits_CV: Tensor) -> tuple[Tensor, Tensor]:
    """Computes `row_sums`."""
    largest_C = logits_CV.amax(1)
    return largest_C, logits_CV.sub_(largest_C[:, None]).exp_().sum(1)


def gradient_formula(
    logits_CV: Tensor, labels_C: Tensor, largest_C: Tensor, factors_C: Tensor, at_label_C: Tensor
) -> None:
    """Computes `to_gradient`."""
    inside_C = (labels_C >= 0) & (labels_C < logits_CV.shape[1])
    label_C1 = torch.where(inside_C, labels_C, 0)[:, None]
    logits_CV.mul_(factors_C[:, None])
    logits_CV.scatter_add_(1, label_C1, torch.where(inside_C, -at_label_C, 0.0)[:, None])


@torch.library.custom_op("apertus::row_sums", mutates_args={"logits_CV"})
def row_sums(logits_CV: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each row, and the sum of exp(logit - largest): each (C,), float32, or float64 as
    the logits. Logits are contiguous, and of bfloat16 only on CUDA. Afterwards, only `to_gradient` can read
    them."""
    return formula(logits_CV)


@torch.library.custom_op("apertus::to_gradient", mutates_args={"logits_CV"})
def to_gradient(
    logits_CV: Tensor, labels_C: Tensor, largest_C: Tensor, factors_C: Tensor, at_label_C: Tensor
) -> None:
    """Overwrites what `row_sums` left of each logit by factor exp(logit - largest), less `at_label_C` at its
    label; a label below 0 or above the last word is of another part of the vocabulary. Dtypes are those of
    `row_sums`."""
    gradient_formula(logits_CV, labels_C, largest_C, factors_C, at_label_C)


@row_sums.register_kernel("cuda")
def _(logits_CV: Tensor) -> tuple[Tensor, Tensor]:
    from apertus_model.losses import softmax_triton

    return (softmax_triton.row_sums if logits_CV.dtype in KERNEL_DTYPES else formula)(logits_CV)


@to_gradient.register_kernel("cuda")
def _(logits_CV: Tensor, labels_C: Tensor, largest_C: Tensor, factors_C: Tensor, at_label_C: Tensor) -> None:
    from apertus_model.losses import softmax_triton

    run = softmax_triton.to_gradient if logits_CV.dtype in KERNEL_DTYPES else gradient_formula
    run(logits_CV, labels_C, largest_C, factors_C, at_label_C)


@row_sums.register_fake
def _(logits_CV: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(logits_CV.dtype, torch.float32)
    return logits_CV.new_empty(len(logits_CV), dtype=dtype), logits_CV.new_empty(len(logits_CV), dtype=dtype)
