"""Run by test_ademamix_triton in a process of its own, since Triton's interpreter has to be chosen before
Triton is imported. Prints, as JSON, the largest differences between the kernel and the foreach path by (dtype
of weights, dtype of moments)."""

import json
import os

import torch

os.environ["TRITON_INTERPRET"] = "1"

from apertus_model.optimizers.ademamix import MOMENTS, AdEMAMix  # after the choice
from apertus_model.optimizers.ademamix_triton import update

SHAPES = [(37, 29), (1,), (1031,), (0, 5), ()]
STEPS = 8


def trained(fused: bool, weights: torch.dtype, moments: torch.dtype) -> tuple[list[torch.Tensor], AdEMAMix]:
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(weights)) for shape in SHAPES]
    optimizer = AdEMAMix(
        parameters,
        lr=1e-2,
        betas=(0.9, 0.99, 0.999),
        alpha_warmup=5,
        beta3_warmup=5,
        weight_decay=0.1,
        fused=fused,
        state_dtype=moments,
    )
    for _ in range(STEPS):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(weights)
        optimizer.step()
    return parameters, optimizer


def cut_is_part_of_whole() -> bool:
    """Whether the kernel, told the place of a part of a matrix, computes of it what it computes of the
    whole."""
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.rand(90, 70, generator=generator) for _ in range(2)] + [
        torch.rand(90, 70, generator=generator).bfloat16() for _ in MOMENTS
    ]
    part = [tensor[20:80, 30:67].contiguous() for tensor in tensors]  # of three blocks
    settings = {
        "lr": 1e-2,
        "betas": (0.9, 0.99, 0.999),
        "alpha": 2.0,
        "corrections": (0.1, 0.01),
        "eps": 1e-8,
        "weight_decay": 0.1,
    }
    update(*tensors, **settings, rounding=([1, -2, 3], 0, 70))
    update(*part, **settings, rounding=([1, -2, 3], 20 * 70 + 30, 70))
    return all(torch.equal(a, b[20:80, 30:67]) for a, b in zip(part, tensors, strict=True))


def main() -> None:
    found = {}
    for weights in (torch.float32, torch.bfloat16):
        for moments in (torch.float32, torch.bfloat16):
            (ours, kernel), (theirs, foreach) = (trained(fused, weights, moments) for fused in (True, False))
            differences = {"weight": [(a - b).abs() for a, b in zip(ours, theirs, strict=True)]}
            for name in MOMENTS:
                differences[name] = [
                    (kernel.state[a][name] - foreach.state[b][name]).abs()
                    for a, b in zip(ours, theirs, strict=True)
                ]
            largest = {
                name: max(values.max().item() for values in lists if values.numel())
                for name, lists in differences.items()
            }
            found[f"{weights} {moments}".replace("torch.", "")] = largest
    print(json.dumps({"cut": cut_is_part_of_whole(), **found}))


main()
