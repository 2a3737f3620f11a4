"""Reading checkpoints of torch's distributed checkpoint format (DCP) without running what they contain.

DCP stores its index (`.metadata`) as a pickle and loads every entry that is not a tensor with an unrestricted
`torch.load`. Here the index may only name the classes that such an index consists of, and only tensors are read.

Invariants: nothing stored in a checkpoint is executed while it is read. What is not what was written is a `CheckpointError`, whatever
torch makes of it.
"""

import importlib
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

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
    "pathlib._local": {"PosixPath"},
}


class CheckpointError(RuntimeError):
    """A checkpoint that does not hold what it should; the message names the entry and what to do."""


@contextmanager
def readable(location: str) -> Iterator[None]:
    """Whatever goes wrong in reading a checkpoint that is there, but for storage that fails, is its damage."""
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise CheckpointError(f"{location} is not complete: {error}; remove the checkpoint from the store") from error
    except OSError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{location} is damaged ({type(error).__name__}: {error}): a file was truncated or altered after it was committed; "
            "remove the checkpoint from the store, and the one before it is used"
        ) from error


class _IndexUnpickler(pickle.Unpickler):
    def __init__(self, stream: IO[bytes]) -> None:
        super().__init__(stream)
        self._named: dict[str, tuple[Any, dict[str, Any]]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if name not in _ALLOWED.get(module, ()):
            raise CheckpointError(
                f"the index of the checkpoint names {module}.{name}, which no checkpoint of tensors contains; "
                "it was not written by this program, or was changed since: do not use it"
            )
        named = getattr(importlib.import_module(module), name)
        if hasattr(named, "__dict__"):
            self._named.setdefault(f"{module}.{name}", (named, dict(vars(named))))
        return named

    def changed(self) -> list[str]:
        """What the pickle has set on classes and functions that it names, by their names. It is undone."""
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


def read_index(stream: IO[bytes]) -> Metadata:
    """The content of a `.metadata` file.

    Raises:
        CheckpointError: it names a class that does not belong there, or an entry that is not a tensor.
    """
    unpickler = _IndexUnpickler(stream)
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


class _TensorsOnly(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with readable(str(self.path)), self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as stream:
            metadata = read_index(stream)
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        try:
            return super().read_data(plan, planner)
        except pickle.UnpicklingError as error:  # torch's message recommends to load it all the same
            raise CheckpointError(f"{self.path} holds something else than tensors where its index says tensors: do not use it") from error


class _LocalReader(_TensorsOnly):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        folder = Path(self.path).resolve()
        _not_linked(folder, ".metadata")
        metadata = super().read_metadata(*args, **kwargs)
        for name in {place.relative_path for place in (metadata.storage_data or {}).values()}:
            _not_linked(folder, name)
        return metadata


def _not_linked(folder: Path, name: str) -> None:
    if (folder / name).resolve().parent != folder:
        raise CheckpointError(f"'{folder / name}' leads out of the checkpoint through a link: do not use it")


class _RemoteReader(_TensorsOnly, FsspecReader):
    pass


def reader(location: str) -> FileSystemReader:
    """A reader for a checkpoint folder, given as local path or fsspec URL."""
    return _RemoteReader(location) if "://" in location else _LocalReader(location)
