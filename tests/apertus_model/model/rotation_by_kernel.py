"""Run by test_rotation_triton in a process of its own, since Triton's interpreter has to be chosen before
Triton is imported. Prints, as JSON, the largest difference between the kernel and the formula in float64, by
dtype, relative to the length of the vector that is rotated; and whether rotating back is the inverse."""

import json
import os
from itertools import product

import torch

os.environ["TRITON_INTERPRET"] = "1"

from apertus_model.model.rotation_triton import rotated  # after the choice
from tests.apertus_model.model.formulas import rotated_in_float64, table

# batch, length, heads, half of a head: blocks that are full, that are not, and halves that are no power of 2
SHAPES = [
    (2, 5, 3, 64),
    (1, 33, 1, 64),
    (3, 7, 2, 24),
    (1, 1, 1, 1),
    (2, 40, 2, 16),
    (0, 4, 2, 8),
    (1, 0, 2, 8),
]


def main() -> None:
    found: dict[str, float] = {}
    generator = torch.Generator().manual_seed(0)
    for dtype, (batch, length, heads, half), each in product(
        (torch.float32, torch.bfloat16), SHAPES, (False, True)
    ):
        x = torch.randn(batch, length, heads, 2 * half, generator=generator).to(dtype)
        rows = table(batch if each else 1, length, half, generator)
        for back in (False, True):
            y = rotated(x, rows, back)
            assert y.shape == x.shape and y.dtype == dtype
            a, b = x.double().chunk(2, dim=-1)
            true, lengths = rotated_in_float64(x, rows, back), (a**2 + b**2).sqrt()
            far = (y.double() - true).abs() / torch.cat([lengths, lengths], dim=-1)
            key = str(dtype).replace("torch.", "")
            found[key] = max([found.get(key, 0.0), *far.flatten().tolist()])
    x = torch.randn(2, 9, 3, 32, generator=generator)
    strided = x.transpose(1, 2).contiguous().transpose(1, 2)
    rows = table(2, 9, 16, generator)
    same = torch.equal(rotated(strided, rows, False), rotated(x, rows, False))
    print(json.dumps({"any strides": same, **found}))


main()
