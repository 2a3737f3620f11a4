"""The sparsity of activations: of the inputs of each layer's down projection, at the places with a label.

Of n activations with absolute values a:

    sparsity     (sqrt(n) - sum a / sqrt(sum a^2)) / (sqrt(n) - 1), by Hoyer (JMLR 5, 2004): 0 if all are
                 equal, also to 0; 1 if all but one are 0
    near_zero    share below a hundredth of the largest

Metrics: `sparsity/layer/<i>` and `near_zero/layer/<i>`, means over the places (and over the runs of a layer
that runs several times), with layers counted from 0; `sparsity` and `near_zero`, means over the layers.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

from apertus_model.losses.cross_entropy import IGNORE_INDEX
from apertus_model.trainer.evaluator import Evaluator
from apertus_model.trainer.loader import SampleLike


def sparsity(evaluator: Evaluator, samples: Sequence[SampleLike]) -> dict[str, float]:
    """The metrics. Collective; one forward pass over the samples, which are the same on every rank."""
    layers = [m for name, m in evaluator.model.named_modules() if name.endswith("feed_forward.down_proj")]
    runs: dict[torch.nn.Module, list[torch.Tensor]] = {layer: [] for layer in layers}
    hooks = [
        layer.register_forward_pre_hook(lambda layer, inputs: runs[layer].append(measures(*inputs)))
        for layer in layers
    ]

    def measured(_: object) -> tuple[torch.Tensor]:
        measures_of_layers = torch.stack([torch.stack(runs[layer]).mean(0) for layer in layers], dim=2)
        for layer in layers:
            runs[layer].clear()
        return (measures_of_layers,)

    (places,) = evaluator.of_places(samples, measured)  # (rows, sequence, layers, 2)
    for hook in hooks:
        hook.remove()
    labels = torch.from_numpy(np.stack([sample.labels for sample in samples]))
    means = places[labels != IGNORE_INDEX].mean(0)
    metrics: dict[str, float] = {}
    for name, values in zip(("sparsity", "near_zero"), means.T, strict=True):
        metrics |= {name: float(values.mean())}
        metrics |= {f"{name}/layer/{layer}": float(value) for layer, value in enumerate(values)}
    return metrics


def measures(activations: torch.Tensor) -> torch.Tensor:
    """Both numbers of each row: (..., n) -> (..., 2), float64."""
    sizes = activations.double().abs()
    root, norm = math.sqrt(sizes.shape[-1]), sizes.square().sum(-1).sqrt()
    near_zero = sizes < 0.01 * sizes.amax(-1, keepdim=True)
    spread = torch.where(norm > 0, sizes.sum(-1) / norm, root)  # from 1 to root
    return torch.stack([(root - spread) / ((root - 1) or 1), near_zero.double().mean(-1)], -1)
