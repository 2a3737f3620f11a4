"""`from: hf:...`: writes the weights of a Hugging Face folder as a checkpoint.

Artifact: checkpoint 1, with float32 weights and no optimizer states, in the format of training checkpoints.

Invariant: one tensor is in memory at a time. Float32 holds every value of the formats of released models, so
exporting in the folder's format gives the imported bits.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner

from apertus_model.model.hf_folder import FolderWeights, shapes
from apertus_model.progress import Progress
from apertus_model.stop import StopSignal
from apertus_model.trainer.checkpoint import STEP, raise_cause
from apertus_model.trainer.checkpoint_writer import CheckpointWriter
from apertus_model.trainer.process import engine_process
from infra.store import Attempt
from specs.stages.hugging_face import ImportModelPart

RESULT = 1  # the step of the checkpoint


def run(attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Copies the weights. HuggingFaceError for a folder that does not hold the weights of its config."""
    part = ImportModelPart.model_validate(attempt.job.spec)
    writer = CheckpointWriter(attempt.store, attempt.folder(attempt.checkpoint_folder(RESULT)))
    with engine_process(threads=attempt.job.launch.cpu_threads), attempt.store.timed():
        stored = FolderWeights(part.url, part.model, attempt.workdir / "shards")
        save_weights(
            stored, part, writer, on_tensor=lambda done, total: progress.update(done, total, "tensors")
        )
    attempt.commit_checkpoint(RESULT, {"tokens": 0, "passes": {}}, files=writer.records)
    attempt.commit(step=RESULT, metrics={"parameters": part.model.parameters})


def save_weights(
    stored: FolderWeights,
    part: ImportModelPart,
    writer: CheckpointWriter,
    *,
    on_tensor: Callable[[int, int], None],
) -> None:
    """Writes the weights of a folder as a checkpoint. StorageError when they cannot be written."""
    sizes = shapes(part.model)
    state: dict[str, torch.Tensor] = {name: torch.empty(sizes[name], device="meta") for name in stored}
    state[STEP] = torch.tensor(RESULT, dtype=torch.int64)
    done = 0

    def read(name: str) -> torch.Tensor:
        nonlocal done
        if name == STEP:
            return state[STEP]
        done += 1
        on_tensor(done, len(sizes))
        return stored[name].float()

    writer.single_file_per_rank = False  # torch keeps all tensors of a file until it is closed
    with raise_cause():
        dcp.save(state, storage_writer=writer, planner=_ReadWhenWritten(read), no_dist=True)


class _ReadWhenWritten(DefaultSavePlanner):
    """A planner that reads each tensor when it is written, and knows only its shape before that."""

    def __init__(self, load: Callable[[str], torch.Tensor]) -> None:
        super().__init__()
        self._load = load

    def lookup_object(self, index: Any) -> torch.Tensor:
        return self._load(index.fqn)
