"""Checkpoints of a run of the engine."""

from pathlib import Path

import torch

from apertus_model.trainer.checkpoint import CheckpointSource
from apertus_model.trainer.checkpoint_reader import reader


def at(folder: Path, step: int, *, optimizer: bool = True) -> CheckpointSource:
    return CheckpointSource(str(folder / f"step-{step}"), step, optimizer)


def full_weights(folder: Path) -> dict[str, torch.Tensor]:
    from torch.distributed.checkpoint import load

    index = reader(str(folder)).read_metadata().state_dict_metadata
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in index.items()}
    load(state, storage_reader=reader(str(folder)), no_dist=True)
    return state
