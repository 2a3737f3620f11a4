"""The `merge` stage: merges the weights of several checkpoints into one model, tensor by tensor; each rank
has some rows of every tensor.

Artifact: checkpoint 1, with weights and no optimizer states. Adapters are merged into the weights first.

Invariants:
- The result has the same bits for any number of processes. Each element is computed on its own, in float64
  and in the order of the inputs, and rounded once to float32; a difference from the base is rounded to
  float32 before. The elements of a difference that are kept follow from a count over all ranks.
- A rank holds its rows of the result and, while it computes, its rows of one tensor: of one checkpoint for an
  average and task arithmetic, of all of them for TIES.
"""

import math
from collections.abc import Iterator, Sequence
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

from apertus_model.model.model import shapes
from apertus_model.progress import Progress
from apertus_model.stop import StopSignal
from apertus_model.trainer.checkpoint import STEP, load_tensors, raise_cause
from apertus_model.trainer.checkpoint_writer import CheckpointWriter
from apertus_model.trainer.config import COLLECTIVE_TIMEOUT_SECONDS
from apertus_model.trainer.process import engine_process
from infra.store import Attempt, Checkpoint
from specs.stages.merge import MergePart

RESULT = 1  # the step of the checkpoint
HALF = 16  # bits by which magnitudes are counted at a time


def run(attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Merges the checkpoints, and commits the result. Raises what `load_tensors` does, and StorageError."""
    part = MergePart.model_validate(attempt.job.spec)
    writer = CheckpointWriter(attempt.store, attempt.folder(attempt.checkpoint_folder(RESULT)))
    parents = [attempt.input_checkpoint(f"checkpoint:{index}") for index in range(len(part.weights))]
    base = attempt.input_checkpoint("base") if part.method != "average" else None
    with engine_process(threads=attempt.job.launch.cpu_threads):
        with attempt.store.timed():
            dist_utils.init_distributed(
                CommConfig(init_timeout_seconds=COLLECTIVE_TIMEOUT_SECONDS), base_folder=attempt.job.scratch
            )
            mesh = init_device_mesh(get_local_device().type, (dist.get_world_size(),))
            sizes = shapes(part.model)
            state: dict[str, torch.Tensor] = {STEP: torch.tensor(RESULT, dtype=torch.int64)}
            for number, (name, shape) in enumerate(sizes.items(), 1):
                state[name] = merge_tensor(name, shape, part, parents, base, mesh)
                if dist.get_rank() == 0:
                    progress.update(number, len(sizes), "tensors")
            with raise_cause():
                dcp.save(state, storage_writer=writer)
        if dist.get_rank() == 0:
            facts = facts_of([parent.facts for parent in parents])
            attempt.commit_checkpoint(RESULT, facts, files=writer.records)
            attempt.commit(step=RESULT, metrics={"checkpoints": len(parents), "tokens": facts["tokens"]})


def facts_of(parents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The facts of the merged model: each count is the largest one among the checkpoints."""
    passes: dict[str, float] = {}
    for facts in parents:
        for source, seen in facts["passes"].items():
            passes[source] = max(passes.get(source, 0.0), seen)
    return {"tokens": max(facts["tokens"] for facts in parents), "passes": passes}


@torch.no_grad()
def merge_tensor(
    name: str,
    shape: torch.Size,
    part: MergePart,
    checkpoints: Sequence[Checkpoint],
    base: Checkpoint | None,
    mesh: DeviceMesh,
) -> DTensor:
    """One merged tensor, in float32, with its rows divided among the ranks of the one-dimensional `mesh`.
    Raises what `load_tensors` does. Collective."""
    result = empty_dtensor(shape, dtype=torch.float32, device_mesh=mesh, placements=[Shard(0)])
    own = result.to_local()

    def loaded() -> Iterator[torch.Tensor]:
        for checkpoint in checkpoints:
            load_tensors({name: result}, checkpoint)
            yield own

    if base is None:
        norm = math.fsum(part.weights)
        own.copy_(weighted_sum(loaded(), [weight / norm for weight in part.weights]))
        return result
    load_tensors({name: result}, base)
    start = own.clone()
    vectors = (trimmed(tensor - start, shape.numel(), part.kept, mesh) for tensor in loaded())
    combine = agreed if part.method == "ties" else weighted_sum
    own.copy_(start.double() + part.scale * combine(vectors, part.weights))
    return result


def weighted_sum(tensors: Iterator[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """sum_i w_i W_i in float64: the sum of the task vectors of arXiv 2212.04089."""
    products = (tensor.double() * weight for tensor, weight in zip(tensors, weights, strict=True))
    total = next(products)
    for product in products:
        total += product
    return total


def agreed(vectors: Iterator[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """For each element, the weighted mean of the vectors in which it has the sign of its weighted sum over
    all vectors, in float64; 0 if no vector has that sign (arXiv 2306.01708, section 3)."""
    kept = list(vectors)
    positive = weighted_sum(iter(kept), weights) >= 0
    total = torch.zeros_like(positive, dtype=torch.float64)
    norm = total.clone()
    for vector, weight in zip(kept, weights, strict=True):
        same = torch.where(positive, vector > 0, vector < 0)
        total += torch.where(same, vector.double() * weight, 0.0)
        norm += same * weight
    return total / norm.where(norm != 0, 1.0)


def trimmed(own: torch.Tensor, elements: int, density: float, mesh: DeviceMesh) -> torch.Tensor:
    """The rows of this rank, with 0 for the elements that are not among the largest fraction `density` of all
    `elements` of the tensor, by magnitude; all elements as large as the smallest kept one are kept, while
    mergekit keeps some of them. Collective."""
    if density == 1.0:
        return own
    sizes = own.abs()
    return own.where(sizes >= kth_largest(sizes, max(1, int(density * elements)), mesh), 0.0)


def kth_largest(own: torch.Tensor, k: int, mesh: DeviceMesh) -> torch.Tensor:
    """The k-th largest of numbers that are not negative, over all ranks: a float32 scalar. Collective.

    The order of such numbers is that of their bits as integers, so two counts over all ranks, of the upper
    and then of the lower 16 bits, find it exactly."""
    bits, largest = own.flatten().view(torch.int32), 0
    for shift in (HALF, 0):
        among = bits[bits >> (shift + HALF) == largest] if shift == 0 else bits
        counts = torch.bincount((among >> shift) & (2**HALF - 1), minlength=2**HALF)
        dist.all_reduce(counts, group=mesh.get_group())
        from_the_top = counts.flip(0).cumsum(0)
        place = int((from_the_top < k).sum())
        k -= int(from_the_top[place - 1]) if place else 0
        largest = (largest << HALF) | (2**HALF - 1 - place)
    return torch.tensor(largest, dtype=torch.int32, device=own.device).view(torch.float32)
