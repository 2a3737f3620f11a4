"""Copying a rank's state to host memory, and writing the copy to the store while training goes on.

Invariants:
- Bounded staging: one host copy of the tensors of a rank, reused from save to save, and no local disk.
- A file is read by nobody to know its digest: it is computed while the file is written, and goes to rank 0 with what DCP gathers anyway.
- Two saves of equal tensors have equal bytes: neither place nor time is written into a checkpoint.
"""

import os
import pickle
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from infra.store import Store
from infra.store.records import FileRecord

Records = dict[str, FileRecord]
_RECORDS = MetadataIndex("records of the files of a rank")


class Staging:
    """Host copies of the tensors of this rank: pinned where they come from a GPU."""

    def __init__(self) -> None:
        self._copies: dict[str, torch.Tensor] = {}

    def copy(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies of what this rank has of each tensor, valid until the next call. Returns when they are complete."""
        copies: dict[str, torch.Tensor] = {}
        for name, tensor in state.items():
            own = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
            buffer = self._copies.get(name)
            if buffer is None or buffer.shape != own.shape or buffer.dtype != own.dtype:
                buffer = torch.empty(own.shape, dtype=own.dtype, pin_memory=own.is_cuda)
            copies[name] = buffer.copy_(own, non_blocking=True)
        self._copies = copies
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return copies


class StagedPlan(DefaultSavePlanner):
    """Says what is written by looking at the tensors of the model, once, and takes the content from their copies."""

    def __init__(self, state: Mapping[str, torch.Tensor], copies: Mapping[str, torch.Tensor], *, is_coordinator: bool) -> None:
        super().__init__(flatten_state_dict=False)
        super().set_up_planner(dict(state), None, is_coordinator)
        self._plan = super().create_local_plan()
        self._copies = copies
        self.state_dict: dict[str, Any] = {}  # the plan is all that is needed of them

    def set_up_planner(self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False) -> None:
        """Everything is known."""

    def create_local_plan(self) -> SavePlan:
        return self._plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """The content of an item: what this rank has of its tensor."""
        return self._copies[write_item.index.fqn]


class CheckpointWriter(FileSystemWriter):
    """DCP's writer, into a folder of the store. `records`, on rank 0 after the save: those of the files of all ranks, by name."""

    def __init__(self, store: Store, folder: str) -> None:
        super().__init__(folder, sync_files=False, per_thread_copy_ahead=0)  # the store syncs; tensors come in the plan's order
        self.fs = self._files = _Files(store)
        self.path = cast(Any, folder)
        self.records: Records = {}

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes the file of this rank; its record goes along with the results."""
        written = super().write_data(plan, planner).wait()
        future: Future[list[WriteResult]] = Future()
        future.set_result([*written, WriteResult(_RECORDS, 0, dict(self._files.records))])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Rank 0, when all have written: the index."""
        places = [written for results_of_rank in results for written in results_of_rank]
        for written in places:
            if written.index == _RECORDS:
                self.records |= cast(Records, written.storage_data)
        metadata.storage_data = {written.index: written.storage_data for written in places if written.index != _RECORDS}
        metadata.storage_meta = StorageMeta()
        metadata.version = CURRENT_DCP_VERSION
        with self._files.create_stream(self._get_metadata_path(), "wb") as stream:
            stream.write(pickle.dumps(metadata))
        self.records |= self._files.records


class _Files(FileSystem):
    """The part of DCP's idea of a filesystem that a writer uses."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.records: Records = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any, None, None]:
        assert mode == "wb", "checkpoints are read elsewhere"
        with self._store.writer(str(path)) as stream:
            yield stream
        self.records[str(path).rsplit("/", 1)[-1]] = stream.record

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        return f"{path}/{suffix}"
