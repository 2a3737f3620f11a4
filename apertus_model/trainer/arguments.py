"""Turns a micro-batch that was read on the host into the arguments of a model."""

from typing import Any

import torch
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.context_parallel import cp_shard

from apertus_model.model.attention import gathered_order
from apertus_model.model.on_host import OnHost, copy_to


def model_arguments(
    model: Any,
    dims: ParallelDims,
    device: torch.device,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    labels: torch.Tensor,
) -> tuple[torch.Tensor, OnHost, dict[str, Any]]:
    """Tokens, labels and further arguments of `ApertusModel.forward` for this rank's part of the rows.

    The host does not wait for the device: labels stay on the host, and so do positions, from which it finds
    document boundaries. If ranks share a sequence, no backend needs positions on the host.

    `model`: `ApertusModel`, or any stage of a pipeline. `tokens`, `positions` (0 at the first token of each
    document) and `labels`: (batch, seq_len), whole rows on the host.
    """
    tokens = copy_to(tokens, device)
    if not dims.cp_enabled:
        return tokens, OnHost(labels), {"positions": OnHost(positions)}
    mesh, balancer = dims.get_mesh("cp"), model.cp_load_balancer
    positions = copy_to(positions, device)
    masks = model.get_attention_masks(positions) if model.cp_mesh is None else None
    (tokens, positions), masks = cp_shard(mesh, (tokens, positions), masks, balancer)
    arguments = {"positions": positions, **({} if masks is None else {"attention_masks": masks})}
    parts = labels[:, gathered_order(labels.shape[1], mesh.size(), balancer)].chunk(mesh.size(), dim=1)
    return tokens, OnHost(parts[mesh.get_local_rank()].contiguous()), arguments
