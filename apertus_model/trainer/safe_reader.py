"""Reading checkpoints of torch's distributed checkpoint format (DCP) without running what they contain.

A checkpoint is a file per rank of the run that wrote it, in which every tensor, or part of one, is what `torch.save` makes of it, and an
index (`.metadata`), which is a pickle. DCP unpickles whatever stands there, and loads every entry that is not a tensor with an unrestricted
`torch.load`. Here the index may only name the classes that such an index consists of, and only tensors are read, the parts that a rank
needs, in the order in which they lie, some of them ahead.

Invariants:
- Nothing stored in a checkpoint is executed while it is read.
- Every byte of a committed checkpoint that is used was compared with its digest (`infra.store.reader`). What differs from what was
  committed is a `DamagedCheckpoint`; what is no checkpoint is a `CheckpointError`, whatever torch makes of it.
- What is held in memory beside the tensors that are loaded does not grow with the files: the blocks that are read ahead, and a copy of the
  tensor in hand where it cannot be read into its place (another device or data type, columns of a matrix).
"""

from __future__ import annotations

import importlib
import io
import math
import pickle
import pickletools
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum, EnumType
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint import StorageReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from apertus_model.trainer.tensor_format import LONGEST, first_byte
from infra.store import Checkpoint, DamagedError
from infra.store.ranges import LocalFile
from infra.store.reader import FETCH_BYTES, RangeFile, cut, read_ahead
from infra.store.records import DamagedCheckpoint

GAP = 2**20  # bytes between two parts that are read along with them

_ALLOWED = {
    "torch": {"Size", "float32", "bfloat16", "float16", "float64", "int64", "int32", "bool"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "pathlib": {"PosixPath"},
}
_MOVED = {"pathlib._local": "pathlib"}  # as Python 3.13 names it, and as every Python finds it


class CheckpointError(RuntimeError):
    """A checkpoint that does not hold what it should; the message names the entry and what to do."""


class Folder(Protocol):
    """The files of a checkpoint."""

    @property
    def name(self) -> str: ...
    def open(self, name: str) -> RangeFile: ...


class LocalFolder:
    """A folder on this machine that no marker names (yet): its files have no digests."""

    def __init__(self, path: str) -> None:
        self.name = path

    def open(self, name: str) -> RangeFile:
        folder = Path(self.name).resolve()
        if (folder / name).resolve().parent != folder:
            raise CheckpointError(f"'{folder / name}' leads out of the checkpoint through a link: do not use it")
        return LocalFile(folder / name)


@contextmanager
def readable(folder: Folder) -> Iterator[None]:
    """Whatever goes wrong in reading a checkpoint that is there, but for storage that fails, is its damage."""
    try:
        yield
    except (CheckpointError, DamagedCheckpoint):
        raise
    except DamagedError as error:
        raise (folder.damaged(error) if isinstance(folder, Checkpoint) else CheckpointError(str(error))) from error
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder.name} is not complete: {error}; remove the checkpoint from the store") from error
    except OSError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{folder.name} is damaged ({type(error).__name__}: {error}): a file was truncated or altered after it was written; "
            "remove the checkpoint from the store, and the one before it is used"
        ) from error


def _foreign(what: str) -> CheckpointError:
    return CheckpointError(
        f"the index of the checkpoint names {what}, which no checkpoint of tensors contains; "
        "it was not written by this program, or was changed since: do not use it"
    )


def _member(kind: Any, name: Any) -> Enum:
    """Stands for `getattr`, by which Python before 3.11.4 pickles members of enums; gives nothing else."""
    if not isinstance(kind, EnumType) or not isinstance(name, str) or name not in kind.__members__:
        raise _foreign("builtins.getattr of something else than a member of an enum")
    return kind.__members__[name]


class _IndexUnpickler(pickle.Unpickler):
    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__(stream)
        self._named: dict[str, tuple[Any, dict[str, Any]]] = {}

    def find_class(self, module: str, name: str) -> Any:
        module = _MOVED.get(module, module)
        if (module, name) == ("builtins", "getattr"):
            return self._watched(f"{module}.{name}", _member)
        if name not in _ALLOWED.get(module, ()):
            raise _foreign(f"{module}.{name}")
        named = getattr(importlib.import_module(module), name)
        if isinstance(named, EnumType):
            members: Mapping[str, Enum] = named.__members__
            for member, value in members.items():
                self._watched(f"{module}.{name}.{member}", value)
        return self._watched(f"{module}.{name}", named)

    def _watched(self, where: str, named: Any) -> Any:
        """The same. What the pickle sets on it is found by `changed`."""
        if hasattr(named, "__dict__"):
            self._named.setdefault(where, (named, dict(vars(named))))
        return named

    def changed(self) -> list[str]:
        """What the pickle has set on classes, functions and members of enums, by name. It is undone."""
        found = []
        for where, (named, before) in self._named.items():
            now = dict(vars(named))
            for name in sorted({name for name in [*now, *before] if now.get(name, named) is not before.get(name, named)}):
                found.append(f"{where}.{name}")
                if name in before:
                    setattr(named, name, before[name])
                else:
                    delattr(named, name)
        return found


def _check_memo(program: bytes) -> None:
    """CheckpointError for a pickle that numbers what it remembers higher than it has bytes: the table for it is
    allocated at once, gigabytes for five bytes. `genops` refuses lengths that are longer than the rest."""
    for opcode, argument, place in pickletools.genops(program):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and not 0 <= int(argument or 0) <= len(program):
            raise CheckpointError(
                f"byte {place} of the index of the checkpoint numbers an object {argument}, and the index has "
                f"{len(program)} bytes: it was made to do harm; do not use it"
            )


def read_index(stream: IO[bytes]) -> Metadata:
    """The content of a `.metadata` file.

    Raises:
        CheckpointError: it names a class that does not belong there, or an entry that is not a tensor.
    """
    program = stream.read()
    _check_memo(program)
    unpickler = _IndexUnpickler(io.BytesIO(program))
    try:
        metadata = unpickler.load()
    finally:
        changed = unpickler.changed()
    if changed:
        raise CheckpointError(f"the index of the checkpoint sets attributes of {', '.join(changed)}: it was made to do harm; do not use it")
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"the index of the checkpoint is a {type(metadata).__name__}, not DCP metadata")
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"entry {name!r} of the checkpoint is not a tensor, and nothing else is loaded")
    for place in (metadata.storage_data or {}).values():
        name = getattr(place, "relative_path", None)
        if not isinstance(name, str) or not re.fullmatch(r"\w[\w.-]*", name):
            raise CheckpointError(f"the index of the checkpoint names the file {name!r}; its files lie beside it: do not use it")
    return metadata


class CheckpointReader(StorageReader):
    """What DCP reads a checkpoint with. The index is read once."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder

    def reset(self, checkpoint_id: Any = None) -> None:
        """One checkpoint is all that it reads."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index. DamagedCheckpoint or CheckpointError when it is not what was written."""
        return self._index

    @cached_property
    def _index(self) -> Metadata:
        with readable(self.folder):
            file = self.folder.open(".metadata")
            metadata = read_index(io.BytesIO(file.read(0, file.size)))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """It has the index."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fills the tensors of the plan. The caller makes `readable` errors of whatever is raised."""
        waiting = {name: deque(sorted(parts, key=_Part.order)) for name, parts in self._parts(plan, planner).items()}
        files = {name: self.folder.open(name) for name in waiting}
        blocks = [(name, *block) for name, parts in waiting.items() for block in _blocks(parts, files[name].size)]
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

    def _parts(self, plan: LoadPlan, planner: LoadPlanner) -> dict[str, list[_Part]]:
        """What is wanted of each file."""
        parts: dict[str, list[_Part]] = {}
        sizes: dict[str, dict[torch.Size, torch.Size]] = {}
        for item in plan.items:
            index, name = item.storage_index, item.storage_index.fqn
            entry, place = self._index.state_dict_metadata[name], self._index.storage_data[index]
            if name not in sizes:
                sizes[name] = {chunk.offsets: chunk.sizes for chunk in entry.chunks}
            part = _Part(item, planner, place, sizes[name][index.offset], entry.properties.dtype)
            if math.prod(item.lengths):
                parts.setdefault(place.relative_path, []).append(part)
        return parts


class _Part:
    """Rows of what is stored as one tensor, and the place of the model that they, or columns of them, go to."""

    def __init__(self, item: ReadItem, planner: LoadPlanner, place: Any, size: torch.Size, dtype: torch.dtype) -> None:
        row = math.prod(size[1:]) * dtype.itemsize
        self._item, self._planner, self._size, self._dtype = item, planner, size, dtype
        self._rows = range(item.storage_offsets[0], item.storage_offsets[0] + item.lengths[0]) if size else range(1)
        self._begin, self._stop = self._rows.start * row, self._rows.stop * row  # among the numbers
        self._around = place.length - math.prod(size) * dtype.itemsize  # bytes that are no numbers, before and behind them
        self.start = place.offset
        self.end = self.start + self._stop + self._around
        self._head = bytearray()
        self._first: int | None = None  # of the numbers, in the file
        if not 0 < self._around <= LONGEST:
            raise ValueError(f"{place.length} bytes are stored of {item.storage_index.fqn!r}, which has {math.prod(size)} numbers")

    def order(self) -> tuple[int, int]:
        """By place in the file."""
        return self.start, self.end

    def spans(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The head, and the numbers with as much behind them as the head may be shorter."""
        return (self.start, self.start + self._around), (self.start + self._begin, self.end)

    def take(self, begin: int, content: bytes) -> None:
        """Bytes of the file from `begin` on; they come in order."""
        if self._first is None:
            known = self.start + len(self._head)
            self._head += content[max(0, known - begin) : max(0, self.start + self._around - begin)]
            if len(self._head) < self._around:
                return
            try:
                self._first = self.start + first_byte(self._head, self._size, self._dtype)
            except ValueError as error:
                raise CheckpointError(
                    f"the checkpoint is damaged, or was made to do harm: it holds something else than tensors where its index says tensors "
                    f"({self._item.storage_index.fqn!r}: {error}); do not use it"
                ) from error
            self._put(self.start, self._head)
        self._put(begin, content)

    def _put(self, begin: int, content: bytes | bytearray) -> None:
        assert self._first is not None, "the head is known"
        place = self._first + self._begin
        low, high = max(begin, place), min(begin + len(content), self._first + self._stop)
        if low < high:
            self._bytes[low - place : high - place] = np.frombuffer(content, np.uint8, high - low, low - begin)

    @cached_property
    def _target(self) -> torch.Tensor:
        target = self._planner.resolve_tensor(self._item).detach()
        if target.size() != self._item.lengths:
            raise ValueError(f"{self._item.storage_index.fqn!r}: {tuple(self._item.lengths)} do not fit into {tuple(target.size())}")
        return target

    @cached_property
    def _stored(self) -> torch.Tensor:
        """The rows as they are stored: the target itself where nothing is to be converted."""
        size = torch.Size([len(self._rows), *self._size[1:]]) if self._size else self._size
        target = self._target
        if target.is_cpu and target.dtype == self._dtype and target.is_contiguous() and target.size() == size:
            return target
        return torch.empty(size, dtype=self._dtype)

    @cached_property
    def _bytes(self) -> npt.NDArray[np.uint8]:
        return self._stored.reshape(-1).view(torch.uint8).numpy()

    def finish(self) -> None:
        """All bytes were taken."""
        if self._stored is not self._target:
            columns = (
                slice(begin, begin + length) for begin, length in zip(self._item.storage_offsets[1:], self._item.lengths[1:], strict=True)
            )
            self._target.copy_(self._stored[slice(None), *columns] if self._size else self._stored)
        self._planner.commit_tensor(self._item, self._target)


def _blocks(parts: Iterable[_Part], size: int) -> list[tuple[int, int]]:
    """What is read of a file of `size` bytes, in order: [begin, end) at a time, of at most `FETCH_BYTES`, ending where pieces end."""
    merged: list[list[int]] = []
    for begin, end in sorted(span for part in parts for span in part.spans()):
        if begin < 0 or end > size:
            raise ValueError(f"the index names bytes {begin} to {end} of a file of {size}")
        if merged and begin <= merged[-1][1] + GAP:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    return [block for begin, end in merged for block in cut(begin, end, FETCH_BYTES)]


def reader(place: Checkpoint | str) -> CheckpointReader:
    """A reader of a committed checkpoint, or of the local folder of one that is not."""
    return CheckpointReader(LocalFolder(place) if isinstance(place, str) else place)
