"""Copies a rank's state to host memory, and writes the copy to the store while training continues.

Invariants:
- Bounded staging: one host copy of the tensors of a rank, reused from save to save, and no local disk.
- No file is read back for its digest. The digest is computed while the file is written, and sent to rank 0
  with the results that DCP gathers anyway.
- Two saves of equal tensors have equal bytes: a checkpoint contains no path and no time.
"""

import itertools
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, StorageWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from apertus_model.model.init import local_part
from apertus_model.trainer.checkpoint_format import (
    DTYPE_NAMES,
    DTYPES,
    INDEX,
    Block,
    shard_name,
    write_header,
)
from infra.store import Store
from infra.store.records import FileRecord

Records = dict[str, FileRecord]
_RECORDS = MetadataIndex("records of the files of a rank")


class Staging:
    """Host copies of the tensors of this rank, pinned if they come from a GPU."""

    def __init__(self) -> None:
        self._copies: dict[str, torch.Tensor] = {}

    def copy(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies this rank's part of each tensor. The copies are complete, and valid until the next call."""
        copies: dict[str, torch.Tensor] = {}
        for name, tensor in state.items():
            own = local_part(tensor).detach()
            buffer = self._copies.get(name)
            if buffer is None or buffer.shape != own.shape or buffer.dtype != own.dtype:
                buffer = torch.empty(own.shape, dtype=own.dtype, pin_memory=own.is_cuda)
            copies[name] = buffer.copy_(own, non_blocking=True)
        self._copies = copies
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return copies


class StagedPlan(DefaultSavePlanner):
    """Plans a save once, from the tensors of the model, and takes the data from their copies."""

    def __init__(
        self, state: Mapping[str, torch.Tensor], copies: Mapping[str, torch.Tensor], *, is_coordinator: bool
    ) -> None:
        super().__init__(flatten_state_dict=False)
        super().set_up_planner(dict(state), None, is_coordinator)
        self._plan = super().create_local_plan()
        self._copies = copies
        self.state_dict: dict[str, torch.Tensor] = {}  # the plan is made and no longer needs them

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Does nothing: the plan is already made."""

    def create_local_plan(self) -> SavePlan:
        return self._plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """The data of an item: this rank's part of its tensor."""
        return self._copies[write_item.index.fqn]


class CheckpointWriter(StorageWriter):
    """DCP's writer of the files of `checkpoint_format`, into a folder of the store. `records`: those of the
    files of all ranks, by name; complete on rank 0 after the save."""

    def __init__(self, store: Store, folder: str) -> None:
        self._store, self._folder = store, folder
        self.records: Records = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        """Does nothing: a writer has one checkpoint."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the store is open."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [replace(plan, storage_data=shard_name(rank)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes the file of this rank, tensor by tensor, and returns its record with the results."""
        future: Future[list[WriteResult]] = Future()
        if not plan.items:
            future.set_result([])
            return future
        blocks = {item.index.fqn: (item, _block(item)) for item in sorted(plan.items, key=_alignment)}
        assert len(blocks) == len(plan.items), "a rank has at most one part of a tensor"
        with self._store.writer(f"{self._folder}/{plan.storage_data}") as stream:
            stream.write(write_header({name: block for name, (_, block) in blocks.items()}))
            for item, _ in blocks.values():
                tensor = planner.resolve_data(item).detach().cpu().contiguous()
                stream.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
        written = [WriteResult(item.index, 0, plan.storage_data) for item, _ in blocks.values()]
        future.set_result([*written, WriteResult(_RECORDS, 0, {plan.storage_data: stream.record})])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the index. Called on rank 0 when all ranks have written."""
        places = {}
        for written in itertools.chain.from_iterable(results):
            places[written.index] = written.storage_data
            if written.index == _RECORDS:
                self.records |= written.storage_data
        tensors = {
            name: {
                "dtype": DTYPE_NAMES[stored.properties.dtype],
                "shape": list(stored.size),
                "parts": [
                    {
                        "file": places[MetadataIndex(name, chunk.offsets)],
                        "offsets": list(chunk.offsets),
                        "shape": list(chunk.sizes),
                    }
                    for chunk in stored.chunks
                ],
            }
            for name, stored in cast(dict[str, TensorStorageMetadata], metadata.state_dict_metadata).items()
        }
        with self._store.writer(f"{self._folder}/{INDEX}") as stream:
            stream.write(json.dumps({"tensors": tensors}, separators=(",", ":")).encode())
        self.records[INDEX] = stream.record


def _alignment(item: WriteItem) -> int:
    """Sort key: tensors of wide numbers come first, so that all are aligned."""
    return -item.tensor_data.properties.dtype.itemsize if item.tensor_data is not None else 0


def _block(item: WriteItem) -> Block:
    """The block that an item writes. TypeError for an item that is not a tensor, or has a type that
    checkpoints cannot hold."""
    data = item.tensor_data
    if data is None or data.properties.dtype not in DTYPE_NAMES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES.values())
        raise TypeError(f"{item.index.fqn!r} is not a tensor of a type that checkpoints can hold ({known})")
    return Block(data.properties.dtype, data.chunk.sizes, data.chunk.offsets)
