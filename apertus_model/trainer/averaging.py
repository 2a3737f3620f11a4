"""Weighted averages of checkpoints, computed tensor by tensor; each rank has some rows of every tensor.

Invariants:
- The result has the same bits for any number of processes. Each element is summed on its own, in float64 and
  in the order of the inputs, with weights divided by their sum, and rounded once to float32.
- A rank holds its rows of the result and, while it computes, its rows of one tensor of one checkpoint.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor import empty as empty_dtensor
from torchtitan.config import CommConfig
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools.utils import get_local_device

from apertus_model.model.model import model_config
from apertus_model.trainer.checkpoint import STEP, load_tensors, raise_cause
from apertus_model.trainer.checkpoint_writer import CheckpointWriter
from apertus_model.trainer.config import COLLECTIVE_TIMEOUT_SECONDS
from infra.store import Checkpoint
from specs.model import ModelSpec


def average_checkpoints(
    spec: ModelSpec,
    checkpoints: Sequence[Checkpoint | str],
    weights: Sequence[float],
    *,
    writer: CheckpointWriter,
    step: int,
    scratch: str,
    on_tensor: Callable[[int, int], None],
) -> None:
    """Writes a checkpoint with the averaged weights of several checkpoints, without optimizer states.
    Collective; starts the process group.

    Args:
        spec: dimensions of the model; all checkpoints must have them.
        checkpoints: committed checkpoints, or local folders of uncommitted ones.
        weights: one per checkpoint, not negative; only their ratios matter.
        writer: writes the new checkpoint; afterwards rank 0's has the records of all files.
        step: the step of the new checkpoint.
        scratch: local folder where torch stores the traces of a collective that hangs.
        on_tensor: called with (done, total) after each tensor.

    Raises:
        CheckpointError: a checkpoint lacks a tensor, or its tensor has another shape.
        StorageError: the result cannot be written.
    """
    dist_utils.init_distributed(
        CommConfig(init_timeout_seconds=COLLECTIVE_TIMEOUT_SECONDS), base_folder=scratch
    )
    mesh = init_device_mesh(get_local_device().type, (dist.get_world_size(),))
    with torch.device("meta"):
        model = model_config(spec, sequence_length=1, attention="sdpa").build()
        shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    state: dict[str, torch.Tensor] = {STEP: torch.tensor(step, dtype=torch.int64)}
    for number, (name, shape) in enumerate(shapes.items()):
        state[name] = average(name, shape, checkpoints, weights, mesh)
        on_tensor(number + 1, len(shapes))
    with raise_cause():
        dcp.save(state, storage_writer=writer)


@torch.no_grad()
def average(
    name: str,
    shape: torch.Size,
    checkpoints: Sequence[Checkpoint | str],
    weights: Sequence[float],
    mesh: DeviceMesh,
) -> DTensor:
    """sum_i w_i W_i / sum_i w_i for one tensor W, in float32, with its rows divided among the ranks.
    Collective.

    Args:
        name: name of the tensor.
        shape: shape of the whole tensor.
        checkpoints: as for `average_checkpoints`.
        weights: one per checkpoint, not negative; only their ratios matter.
        mesh: one-dimensional mesh of all ranks.

    Raises:
        CheckpointError: a checkpoint lacks the tensor, or its tensor has another shape.
    """
    result = empty_dtensor(shape, dtype=torch.float32, device_mesh=mesh, placements=[Shard(0)])
    own = result.to_local()
    total = torch.zeros_like(own, dtype=torch.float64)
    norm = math.fsum(weights)
    for checkpoint, weight in zip(checkpoints, weights, strict=True):
        load_tensors({name: result}, checkpoint)
        total += own.double() * (weight / norm)
    own.copy_(total)
    return result
