"""Run by test_softmax_triton in a process of its own, since Triton's interpreter has to be chosen before
Triton is imported. Prints, as JSON, the largest differences between the kernels and the formulas in float64,
by result and dtype: of sums, relative to the sum; of gradients, relative to the factor."""

import json
import os
from itertools import product

import torch

os.environ["TRITON_INTERPRET"] = "1"

from apertus_model.losses import softmax_triton  # after the choice
from apertus_model.losses.softmax import formula, gradient_formula

SHAPES = [(1, 1), (3, 7), (2, 4096), (5, 4097), (2, 9001)]
SCALES = (1e-3, 1.0, 30.0)


def labels_of(rows: int, words: int, generator: torch.Generator) -> torch.Tensor:
    """Some are words of another part of the vocabulary."""
    labels = torch.randint(-words, 2 * words, (rows,), generator=generator)
    labels[0] = words - 1
    return labels


def not_finite() -> bool:
    """Whether NaN and infinity reach the sums, as in the formula."""
    logits = torch.zeros(3, 10)
    logits[0, 3], logits[1, 4] = float("nan"), float("inf")
    total = softmax_triton.row_sums(logits)[1]
    return total.isnan().tolist() == [True, True, False] and bool(total[2] == 10)


def main() -> None:
    found: dict[str, float] = {}

    def note(name: str, dtype: torch.dtype, differences: torch.Tensor) -> None:
        key = f"{name}, {dtype}".replace("torch.", "")
        found[key] = max([found.get(key, 0.0), *differences.abs().flatten().tolist()])

    generator = torch.Generator().manual_seed(0)
    for dtype, (rows, words), scale in product((torch.float32, torch.bfloat16), SHAPES, SCALES):
        logits = (scale * torch.randn(rows, words, generator=generator)).to(dtype)
        labels = labels_of(rows, words, generator)
        largest, total = softmax_triton.row_sums(logits)
        expected = logits.double()
        true = formula(expected)
        assert torch.equal(largest, true[0].float())
        note("sums", dtype, total.double() / true[1] - 1)
        factors, at_label = torch.rand(2, rows, generator=generator)
        gradient_formula(expected, labels, true[0], (factors / total).double(), at_label.double())
        softmax_triton.to_gradient(logits, labels, largest, factors / total, at_label)
        assert logits.dtype == dtype
        note("gradients", dtype, logits.double() - expected)
    print(json.dumps({"not finite": not_finite(), **found}))


main()
