"""Run by test_softmax_triton in a process of its own, since Triton's interpreter has to be chosen before
Triton is imported. Prints, as JSON, the largest differences between the kernels and the formulas in float64,
by result and dtype: of sums, relative to the sum; of gradients, relative to the factor."""

import json
import os
import threading
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

os.environ["TRITON_INTERPRET"] = "1"

from apertus_model.losses import cross_entropy, softmax_triton  # after the choice
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


class HalfVocab(cross_entropy.VocabShard):
    """The words of one of two threads."""

    barrier, shared = threading.Barrier(2), dict[int, torch.Tensor]()

    def reduce(self, values: torch.Tensor, operation: dist.ReduceOp.RedOpType) -> torch.Tensor:
        self.shared[self.begin] = values.clone()
        self.barrier.wait()
        both = torch.stack([*self.shared.values()])
        self.barrier.wait()
        return values.copy_(both.amax(0) if operation == dist.ReduceOp.MAX else both.sum(0))


def by_halves(logits: torch.Tensor, labels: torch.Tensor, factors: torch.Tensor) -> list[torch.Tensor]:
    """ln p(label), and the gradient, of two threads with half of the words each."""
    parts: dict[int, Any] = {}

    def work(begin: int) -> None:
        own = logits[:, begin:][:, : logits.shape[1] // 2].contiguous()
        softmax = cross_entropy.Softmax(own, labels, HalfVocab(begin, object()))  # type: ignore[arg-type]
        parts[begin] = softmax.log_probabilities_C, softmax.gradient(factors)

    threads = [threading.Thread(target=work, args=(half * logits.shape[1] // 2,)) for half in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [parts[0][0], torch.cat([parts[begin][1] for begin in sorted(parts)], 1)]


def shards() -> dict[str, float]:
    """The largest differences where one half has far smaller logits."""
    lock = threading.Lock()  # the interpreter runs a kernel at a time

    def locked(kernel: Any) -> Any:
        def run(*arguments: Any) -> Any:
            with lock:
                return kernel(*arguments)

        return run

    cross_entropy.has_kernels = lambda tensor: True
    cross_entropy.row_sums = locked(softmax_triton.row_sums)
    cross_entropy.to_gradient = locked(softmax_triton.to_gradient)
    found = {"halves, ln p": 0.0, "halves, gradient": 0.0}
    generator = torch.Generator().manual_seed(0)
    for gap in (0.0, 50.0, 110.0, 3000.0):
        logits = 2 * torch.randn(6, 2000, generator=generator)
        logits[:, 1000:] -= gap
        labels, factors = torch.randint(2000, (6,), generator=generator), torch.rand(6, generator=generator)
        log_p = logits.double().log_softmax(1)
        gradient = factors.double()[:, None] * log_p.exp()
        gradient[torch.arange(6), labels] -= factors.double()
        expected = log_p[torch.arange(6), labels]
        of_labels, found_gradient = by_halves(logits, labels, factors)
        differences = ((of_labels - expected) / expected).abs().max(), (found_gradient - gradient).abs().max()
        found = {name: max(found[name], float(new)) for name, new in zip(found, differences, strict=True)}
    return found


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
    print(json.dumps({"not finite": not_finite(), **found, **shards()}))


main()
