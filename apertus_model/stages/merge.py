"""The `merge` stage: a weighted average of checkpoints, tensor by tensor.

Artifact: checkpoint 1, of weights without optimizer states. A checkpoint with adapters counts with its merged weights.

Invariants:
- The result has the same bits for any number of processes: every element is summed by itself, in float64, in the order of the
  inputs, with weights that add up to one in float64, and rounded once to float32.
- A rank holds its part of the result, and of one tensor at a time of one parent beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

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
from apertus_model.progress import Progress
from apertus_model.stop import StopSignal
from apertus_model.trainer.checkpoint import STEP, load_tensors, writer
from apertus_model.trainer.config import COLLECTIVE_TIMEOUT_SECONDS
from apertus_model.trainer.process import engine_process
from infra.store import Artifact, Attempt
from specs.job import Job
from specs.launch import Launch
from specs.stages.merge import MergePart

RESULT = 1  # the step of the checkpoint


def run(job: Job, attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Averages the checkpoints, and commits the average."""
    part = MergePart.model_validate(job.spec)
    parents = [job.inputs[f"checkpoint:{index}"] for index in range(len(part.weights))]
    locations = [attempt.store.location(parent.checkpoint or "") for parent in parents]
    with engine_process(threads=Launch.model_validate(job.launch).threads or 2):
        dist_utils.init_distributed(CommConfig(init_timeout_seconds=COLLECTIVE_TIMEOUT_SECONDS), base_folder=job.scratch)
        first = dist.get_rank() == 0
        mesh = init_device_mesh(get_local_device().type, (dist.get_world_size(),))
        with torch.device("meta"):
            shapes = {name: tensor.shape for name, tensor in model_config_of(part).build().state_dict().items()}
        state: dict[str, Any] = {STEP: torch.tensor(RESULT, dtype=torch.int64)}
        for number, (name, shape) in enumerate(shapes.items()):
            with attempt.store.timed():
                state[name] = average(name, shape, locations, part.weights, mesh)
            if first:
                progress.update(number + 1, len(shapes), "tensors")
        with attempt.store.timed():
            dcp.save(state, storage_writer=writer(attempt.location(attempt.checkpoint_folder(RESULT))))
        if first:
            facts = facts_of([Artifact(attempt.store, parent.path or "").checkpoint(parent.step or 0).facts for parent in parents])
            attempt.commit_checkpoint(RESULT, facts)
            attempt.commit(step=RESULT, metrics={"checkpoints": len(parents), "tokens": facts["tokens"]})


def model_config_of(part: MergePart) -> Any:
    """The config of the model whose tensors are averaged; nothing is computed with it."""
    return model_config(part.model, sequence_length=part.sequence_length, attention="sdpa")


@torch.no_grad()
def average(name: str, shape: torch.Size, locations: Sequence[str], weights: Sequence[float], mesh: DeviceMesh) -> DTensor:
    """sum_i w_i W_i / sum_i w_i of one tensor: float32, its rows spread over the ranks. Collective.

    Args:
        name, shape: of the tensor.
        locations: checkpoint folders.
        weights: one per folder, not negative; only their ratios matter.
        mesh: all ranks.

    Raises:
        CheckpointError: a checkpoint has no such tensor, or one of another shape.
    """
    result = empty_dtensor(shape, dtype=torch.float32, device_mesh=mesh, placements=[Shard(0)])
    own = result.to_local()
    total = torch.zeros_like(own, dtype=torch.float64)
    norm = math.fsum(weights)
    for location, weight in zip(locations, weights, strict=True):
        load_tensors({name: result}, location)
        total += own.double() * (weight / norm)
    own.copy_(total)
    return result


def facts_of(parents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What is known of the average from the facts of the checkpoints: it has seen what the one has that has seen most of it."""
    passes: dict[str, float] = {}
    for facts in parents:
        for source, seen in facts["passes"].items():
            passes[source] = max(passes.get(source, 0.0), seen)
    return {"tokens": max(facts["tokens"] for facts in parents), "passes": passes}
