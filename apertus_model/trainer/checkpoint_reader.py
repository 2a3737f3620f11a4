"""Reads checkpoints (`checkpoint_format`) through DCP. A rank reads only the parts that it needs, in file
order, some of them ahead.

Invariants:
- Nothing stored in a checkpoint is executed while it is read: it is JSON and bytes of tensors.
- Every byte used was compared with its digest (`infra.store.files.reader`). A difference is a
  `DamagedCheckpoint`; files that are not a valid checkpoint are a `CheckpointError`.
- The memory used besides the loaded tensors does not grow with the files: the index, the blocks read ahead,
  and a copy of the current tensor if it cannot be read in place (another device or data type, or columns of a
  matrix).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint import StorageReader
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from apertus_model.trainer.checkpoint_format import (
    DTYPES,
    INDEX,
    CheckpointIndex,
    first_read,
    read_header,
    read_index,
)
from infra.store import Checkpoint, DamagedError
from infra.store.files.reader import FETCH_BYTES, RangeFile, cut, read_ahead
from infra.store.records import DamagedCheckpoint

GAP = 2**20  # parts at most this many bytes apart are read together, with the bytes between them


class CheckpointError(RuntimeError):
    """A checkpoint lacks an entry or has a wrong one. The message names the entry and the fix."""


@contextmanager
def read_errors(checkpoint: Checkpoint) -> Iterator[None]:
    """Turns errors of reading into DamagedCheckpoint or CheckpointError; storage errors pass unchanged."""
    try:
        yield
    except (CheckpointError, DamagedCheckpoint):
        raise
    except DamagedError as error:
        raise checkpoint.damaged(error) from error
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{checkpoint.name} is not complete: {error}; remove the checkpoint from the store"
        ) from error
    except OSError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{checkpoint.name} is damaged ({type(error).__name__}: {error}): a file was truncated or altered"
            " after it was written; remove the checkpoint from the store: the one before it is then used"
        ) from error


def metadata_of(index: CheckpointIndex) -> dcp.Metadata:
    """An index as DCP's metadata, with the file of each part as `storage_data`."""
    tensors = {
        name: dcp.TensorStorageMetadata(
            dcp.TensorProperties(DTYPES[stored.dtype]),
            torch.Size(stored.shape),
            [
                dcp.ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.shape))
                for part in stored.parts
            ],
        )
        for name, stored in index.tensors.items()
    }
    files = {
        dcp.MetadataIndex(name, torch.Size(part.offsets)): part.file
        for name, stored in index.tensors.items()
        for part in stored.parts
    }
    return dcp.Metadata(tensors, storage_data=files, storage_meta=dcp.StorageMeta())


class CheckpointReader(StorageReader):
    """DCP's reader of one checkpoint. It reads the index once."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def reset(self, checkpoint_id: Any = None) -> None:
        """Does nothing: a reader has one checkpoint."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """The index. DamagedCheckpoint or CheckpointError when it differs from what was written."""
        return self._index

    @cached_property
    def _index(self) -> dcp.Metadata:
        with read_errors(self._checkpoint):
            file = self._checkpoint.open(INDEX)
            return metadata_of(read_index(file.read(0, file.size)))

    def set_up_storage_reader(
        self, metadata: dcp.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Does nothing: `read_metadata` has read the index."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fills the tensors of the plan. The caller surrounds it with `read_errors`."""
        names = sorted({self._index.storage_data[item.storage_index] for item in plan.items})
        files = {name: self._checkpoint.open(name) for name in names}
        waiting = {
            name: deque(sorted(parts, key=_PartToRead.order))
            for name, parts in self._parts(plan, planner, files).items()
        }
        blocks = [(name, *block) for name, parts in waiting.items() for block in _blocks(parts)]
        contents = read_ahead((files[name], begin, end) for name, begin, end in blocks)
        for (name, begin, end), content in zip(blocks, contents, strict=True):
            parts = waiting[name]
            for part in parts:
                if part.start >= end:
                    break
                part.take(begin, content)
            while parts and parts[0].end <= end:
                parts.popleft().finish()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _parts(
        self, plan: LoadPlan, planner: LoadPlanner, files: Mapping[str, RangeFile]
    ) -> dict[str, list[_PartToRead]]:
        beginnings = read_ahead(first_read(file) for file in files.values())
        headers = {
            name: read_header(files[name], first) for name, first in zip(files, beginnings, strict=True)
        }
        parts: dict[str, list[_PartToRead]] = {}
        sizes: dict[str, dict[torch.Size, torch.Size]] = {}
        for item in plan.items:
            index, name = item.storage_index, item.storage_index.fqn
            tensor, file = self._index.state_dict_metadata[name], self._index.storage_data[index]
            if name not in sizes:
                sizes[name] = {chunk.offsets: chunk.sizes for chunk in tensor.chunks}
            if name not in headers[file]:
                raise ValueError(
                    f"{files[file].name} has no tensor {name!r}, but the index says that it has a part of it"
                )
            entry, begin = headers[file][name]
            of_index = sizes[name][index.offset], tensor.properties.dtype
            if (of_header := (torch.Size(entry.shape), DTYPES[entry.dtype])) != of_index:
                raise ValueError(
                    f"{files[file].name} has {of_header} of {name!r}, but the index states {of_index}"
                )
            if math.prod(item.lengths):
                parts.setdefault(file, []).append(_PartToRead(item, planner, begin, *of_index))
        return parts


class _PartToRead:
    """Rows of one stored tensor, and the part of the model's tensor that they, or some of their columns,
    fill. `begin`: position of the stored tensor in the file; `size` and `dtype`: its own."""

    def __init__(
        self, item: ReadItem, planner: LoadPlanner, begin: int, size: torch.Size, dtype: torch.dtype
    ) -> None:
        row = math.prod(size[1:]) * dtype.itemsize
        self._item, self._planner, self._size, self._dtype = item, planner, size, dtype
        self._rows = (
            range(item.storage_offsets[0], item.storage_offsets[0] + item.lengths[0]) if size else range(1)
        )
        self.start, self.end = begin + self._rows.start * row, begin + self._rows.stop * row

    def order(self) -> tuple[int, int]:
        """Sort key: position in the file."""
        return self.start, self.end

    def take(self, begin: int, content: bytes) -> None:
        """Copies what belongs to this part from `content`, the bytes of the file from `begin` on."""
        low, high = max(begin, self.start), min(begin + len(content), self.end)
        if low < high:
            self._bytes[low - self.start : high - self.start] = np.frombuffer(
                content, np.uint8, high - low, low - begin
            )

    @cached_property
    def _target(self) -> torch.Tensor:
        target = self._planner.resolve_tensor(self._item).detach()
        if target.size() != self._item.lengths:
            raise ValueError(
                f"{self._item.storage_index.fqn!r}: {tuple(self._item.lengths)} do not fit into"
                f" {tuple(target.size())}"
            )
        return target

    @cached_property
    def _stored(self) -> torch.Tensor:
        """The rows as they are stored. The target itself when it needs no conversion."""
        size = torch.Size([len(self._rows), *self._size[1:]]) if self._size else self._size
        target = self._target
        if target.is_cpu and target.dtype == self._dtype and target.is_contiguous() and target.size() == size:
            return target
        return torch.empty(size, dtype=self._dtype)

    @cached_property
    def _bytes(self) -> npt.NDArray[np.uint8]:
        return self._stored.reshape(-1).view(torch.uint8).numpy()

    def finish(self) -> None:
        """Fills the target. Called when all bytes have been taken."""
        if self._stored is not self._target:
            columns = (
                slice(begin, begin + length)
                for begin, length in zip(self._item.storage_offsets[1:], self._item.lengths[1:], strict=True)
            )
            self._target.copy_(self._stored[slice(None), *columns] if self._size else self._stored)
        self._planner.commit_tensor(self._item, self._target)


def _blocks(parts: Iterable[_PartToRead]) -> list[tuple[int, int]]:
    """The ranges [begin, end) to read, in order, of at most `FETCH_BYTES`; each ends where a piece ends."""
    merged: list[list[int]] = []
    for begin, end in sorted(part.order() for part in parts):
        if merged and begin <= merged[-1][1] + GAP:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    return [block for begin, end in merged for block in cut(begin, end, FETCH_BYTES)]
