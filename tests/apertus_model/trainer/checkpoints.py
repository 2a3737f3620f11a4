"""Checkpoints of a run of the engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from apertus_model.trainer.checkpoint import CheckpointSource
from apertus_model.trainer.checkpoint_reader import CheckpointError, CheckpointReader
from infra.store import DamagedError
from infra.store.reading.ranges import LocalFile


@dataclass(frozen=True)
class LocalCheckpoint:
    """A folder that no marker names, to be loaded like a committed checkpoint: its files have no digests."""

    folder: Path

    @property
    def name(self) -> str:
        return str(self.folder)

    def open(self, name: str) -> LocalFile:
        return LocalFile(self.folder / name)

    def damaged(self, error: DamagedError) -> CheckpointError:
        return CheckpointError(str(error))


def at(folder: Path, step: int, *, optimizer: bool = True) -> CheckpointSource:
    return CheckpointSource(LocalCheckpoint(folder / f"step-{step}"), step, optimizer)


def full_weights(folder: Path) -> dict[str, torch.Tensor]:
    from torch.distributed.checkpoint import load

    index = CheckpointReader(LocalCheckpoint(folder)).read_metadata().state_dict_metadata
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in index.items()}
    load(state, storage_reader=CheckpointReader(LocalCheckpoint(folder)), no_dist=True)
    return state
