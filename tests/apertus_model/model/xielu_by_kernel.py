"""Run by test_xielu_triton in a process of its own, since Triton's interpreter has to be chosen before
Triton is imported. Prints, as JSON, the largest differences between the kernels and the formula in float64,
by result and dtype, relative to the sum of the sizes of the terms."""

import json
import os
from functools import partial
from itertools import product
from typing import Any

import torch

os.environ["TRITON_INTERPRET"] = "1"

from triton.runtime import interpreter

from apertus_model.model import xielu_triton  # after the choice
from apertus_model.model.xielu import BETA
from tests.apertus_model.model.formulas import xielu_in_float64

SHAPES = [(0,), (1,), (7,), (3, 2048), (5, 1031)]
SCALES = torch.tensor([1e-6, 1e-3, 0.3, 1.0, 30.0])  # one or another for each element
ALPHAS = ((0.2, -0.85), (-9.0, 4.0), (25.0, -25.0), (0.0, 0.0))
NAMES = ("value", "gradient by x", "gradient by alpha_p", "gradient by alpha_n")


forward, backward = (partial(kernel, beta=BETA) for kernel in (xielu_triton.forward, xielu_triton.backward))


class LastBlock(interpreter.GridExecutor):
    """Runs the last block of a grid alone, where tensors are."""

    def __init__(self, fn: Any, names: Any, grid: tuple[int], *rest: Any) -> None:
        super().__init__(fn, names, (1,), *rest)
        index = grid[0] - 1, 0, 0
        interpreter.interpreter_builder.set_grid_idx = lambda x, y, z: setattr(
            interpreter.interpreter_builder, "grid_idx", index
        )

    def _restore_args_dev(self, *args: Any) -> None:
        pass


def end_of_many() -> bool:
    """Whether results are right beyond 2^31 elements. Only the pages of the last ones are ever touched."""
    interpreter.GridExecutor = LastBlock
    alphas = torch.tensor([0.2]), torch.tensor([-0.85])
    end = torch.linspace(-3, 3, 100).bfloat16()
    x = torch.empty(2**31 + 100, dtype=torch.bfloat16)
    x[-100:] = end
    return torch.equal(forward(x, *alphas)[-100:], forward(end, *alphas)) and torch.equal(
        backward(x, x, *alphas)[0][-100:], backward(end, end, *alphas)[0]
    )


def keeps_nan() -> bool:
    x, alpha = torch.tensor([1.0, float("nan"), -1.0]), torch.tensor([0.5])
    results = forward(x, alpha, alpha), backward(torch.ones(3), x, alpha, alpha)[0]
    return all(result.isnan().tolist() == [False, True, False] for result in results)


def main() -> None:
    found: dict[str, float] = {}
    generator = torch.Generator().manual_seed(0)
    for dtype, shape, alphas in product((torch.float32, torch.bfloat16), SHAPES, ALPHAS):
        gradient, x = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
        x *= SCALES[torch.randint(len(SCALES), shape, generator=generator)]
        alpha_p, alpha_n = (torch.tensor([value], dtype=dtype) for value in alphas)
        results = forward(x, alpha_p, alpha_n), *backward(gradient, x, alpha_p, alpha_n)
        true = xielu_in_float64(gradient, x, alpha_p, alpha_n)
        for name, result, expected, size in zip(NAMES, results, *true, strict=True):
            assert result.shape == expected.shape and result.dtype == dtype
            far = (result.double() - expected).abs() / size.clamp(min=1e-300)
            key = f"{name}, {dtype}".replace("torch.", "")
            found[key] = max([found.get(key, 0.0), *far.flatten().tolist()])
    print(json.dumps({"keeps nan": keeps_nan(), "end of 2^31 elements": end_of_many(), **found}))


main()
