"""Norms of weights and optimizer states by layer: they show damage that loss and gradient do not show yet.

Invariant: norms are those of whole tensors, whatever the layout; nothing is changed.
"""

import re
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torchtitan.distributed import ParallelDims

from apertus_model.trainer.optimizer import Optimizers

LAYER = re.compile(r"layers\.\d+")
INDICES = "0123456789."  # at the end of a state's name: its place in a list


@torch.no_grad()
def norms(
    model_parts: Sequence[torch.nn.Module], optimizers: Optimizers, dims: ParallelDims
) -> dict[str, float]:
    """The L2 norm of each kind of tensor in each layer: `weights/layers.0`, `exp_avg/embedding`. The last
    normalisation belongs to `output`. Waits for the GPU. Collective."""
    groups: dict[str, list[torch.Tensor]] = {}
    for part in model_parts:
        for name, parameter in part.named_parameters():
            groups.setdefault(f"weights/{_layer(name)}", []).append(parameter)
    for name, state in optimizers.tensors().items():
        if state.ndim:  # not a counter
            kind = name.rstrip(INDICES).rsplit(".", 1)[-1]
            groups.setdefault(f"{kind}/{_layer(name)}", []).append(state)
    totals = [torch.nn.utils.get_total_norm(tensors, foreach=True) for tensors in groups.values()]
    whole = [total.full_tensor() if isinstance(total, DTensor) else total for total in totals]
    by_group = dict(zip(groups, torch.stack([total.float() for total in whole]).tolist(), strict=True))
    if (mesh := dims.get_optional_mesh("pp")) is not None:  # each stage has layers of its own
        stages = [by_group] * mesh.size()
        dist.all_gather_object(stages, by_group, group=mesh.get_group())
        by_group = {name: norm for stage in stages for name, norm in stage.items()}
    return by_group


def _layer(name: str) -> str:
    if match := LAYER.search(name):
        return match[0]
    return "embedding" if "tok_embeddings" in name else "output"
