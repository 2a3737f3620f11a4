"""Sharpness: the trace of the Hessian of the held-out loss, by Hutchinson's estimate.

For a vector v of independent random signs, E[v^T H v] = tr H (Hutchinson 1990, Communications in Statistics
19(2); as in arXiv 2603.16127, which compares pretraining schedules by it). H v is a central difference of
gradients,

    v^T H v = v^T (g(w + e v) - g(w - e v)) / 2 e + O(e^2),      e = STEP x root mean square of all weights,

since neither FSDP nor the fused losses can be differentiated twice. The variance over v is twice the sum of
the squares of H outside of its diagonal, so the mean over a few dozen probes of a large model is already
precise; its interval is stored.

Metrics:

    loss                                    mean loss, in nats per token, on the sequences
    sharpness/trace                         mean of v^T H v over the probes
    sharpness                               the same divided by the number of parameters
    sharpness/low, sharpness/high           95% interval of the mean over the probes (bootstrap)
    parameters                              their number

Invariants: a sign is a function of (seed, probe, parameter, element), so no layout changes it. An element
that several ranks hold counts once. The weights are restored bit by bit.
"""

import math
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torchtitan.components.checkpointer.utils import canonical_fqn

from apertus_model.evaluation.paired import interval
from apertus_model.hashing import hashed, signed
from apertus_model.model.init import local_part, owned_region, sum_over_shards
from apertus_model.progress import Progress
from apertus_model.trainer.evaluator import Evaluator
from apertus_model.trainer.loader import SampleLike

STEP = 1e-3


class WeightCopy(NamedTuple):
    name: str
    parameter: torch.Tensor
    original: torch.Tensor  # copy of this rank's part


def sharpness(
    evaluator: Evaluator,
    samples: Sequence[SampleLike],
    *,
    probes: int,
    seed: int,
    progress: Progress,
    step: float = STEP,
) -> dict[str, float]:
    """Estimates the trace with `probes` random vectors. Collective; 2 x `probes` forward and backward passes
    over all samples, which are the same on every rank; needs memory for the weights twice and their
    gradients. `step`: distance of the difference, relative to the root mean square of the weights."""
    weights = [
        WeightCopy(canonical_fqn(name), p, local_part(p).detach().clone())
        for name, p in evaluator.model.named_parameters()
    ]
    parameters = sum(weight.parameter.numel() for weight in weights)
    distance = step * math.sqrt(
        _sum([(weight.parameter, weight.original.double().square().sum()) for weight in weights]) / parameters
    )
    loss = evaluator.loss(samples).nats
    products = []
    for probe in range(probes):
        vector = zlib.crc32(f"{seed}/{probe}".encode())
        products.append(_curvature(evaluator, samples, weights, vector, distance))
        progress.update(probe + 1, probes, "probes")
    trace = float(np.mean(products))
    low, high = interval(np.array(products) / parameters)
    return {
        "loss": loss,
        "sharpness": trace / parameters,
        "sharpness/low": low,
        "sharpness/high": high,
        "sharpness/trace": trace,
        "parameters": parameters,
    }


def _curvature(
    evaluator: Evaluator, samples: Sequence[SampleLike], weights: list[WeightCopy], seed: int, distance: float
) -> float:
    """v^T H v for one vector."""
    slopes = []
    for sign in (1.0, -1.0):
        for weight in weights:
            moved = weight.original + sign * distance * signs(weight.parameter, weight.name, seed)
            local_part(weight.parameter.data).copy_(moved)
        evaluator.gradient(samples)
        slopes.append(_sum([(weight.parameter, _along(weight, seed)) for weight in weights]))
    for weight in weights:
        local_part(weight.parameter.data).copy_(weight.original)
    evaluator.model.zero_grad()
    return (slopes[0] - slopes[1]) / (2 * distance)


def _along(weight: WeightCopy, seed: int) -> torch.Tensor:
    """This rank's part of v^T g, float64."""
    gradient = weight.parameter.grad
    assert gradient is not None, "the loss depends on every parameter"
    if isinstance(gradient, DTensor) and isinstance(weight.parameter, DTensor):
        gradient = gradient.redistribute(placements=weight.parameter.placements)
    return (local_part(gradient).double() * signs(weight.parameter, weight.name, seed)).sum()


def _sum(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """The sum, over all parameters, of scalars that each belong to this rank's part of a parameter."""
    total = 0.0
    for parameter, own in parts:
        if isinstance(parameter, DTensor):
            own = sum_over_shards(own, parameter.device_mesh, parameter.placements)
        total += float(own)
    return total


def signs(parameter: torch.Tensor, name: str, seed: int) -> torch.Tensor:
    """Random signs, 1 or -1, for this rank's part of a parameter, in its dtype."""
    local = local_part(parameter)
    offsets, sizes = owned_region(parameter)
    index = torch.zeros(sizes, dtype=torch.int32, device=local.device)
    stride = 1
    for dimension in reversed(range(len(sizes))):
        begin, end = offsets[dimension], offsets[dimension] + sizes[dimension]
        places = torch.arange(begin, end, dtype=torch.int32, device=local.device)
        index += (places * stride).view([-1] + [1] * (len(sizes) - dimension - 1))
        stride = signed(stride * parameter.shape[dimension])
    bits = hashed(index, signed(zlib.crc32(f"{seed}/{name}".encode())))
    return (bits & 1).to(local.dtype).mul_(2).sub_(1)
