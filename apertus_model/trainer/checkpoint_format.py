"""The files of a checkpoint: safetensors, and an index in JSON.

    rank-00000.safetensors    what rank 0 of the run had of every tensor, for any reader of safetensors
    index.json                {"tensors": {NAME: {"dtype": "F32", "shape": [8, 4], "parts": [
                                  {"file": "rank-00000.safetensors", "offsets": [0, 0], "shape": [4, 4]}, ...]}}}

A part is a block of a tensor that begins at `offsets`. The header of a file states in `__metadata__` the
offsets of its parts as torch.distributed.checkpoint's Hugging Face storage does, so that storage reads these
folders too.

Invariant: what is read is JSON within the bounds of `specs.foreign`, checked against the models here, and
bytes of tensors at places that lie inside the file. Equal tensors make equal bytes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field, model_validator

from infra.store.files.reader import RangeFile
from specs.foreign import Foreign, checked, parse_json

INDEX = "index.json"
INDEX_BYTES, INDEX_VALUES = 2**31, 2**28  # at most: 20 million parts
DTYPES = {
    "BF16": torch.bfloat16,
    "BOOL": torch.bool,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I32": torch.int32,
    "I64": torch.int64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LENGTH = struct.Struct("<Q")  # of the header, which begins behind it
_FIRST_READ = 2**12  # bytes of a file that are read before the length of its header is known

DtypeName = Literal["BF16", "BOOL", "F16", "F32", "F64", "I32", "I64"]
Sizes = list[Annotated[int, Field(ge=0, lt=2**63)]]


class Part(Foreign):
    """A block of a tensor, and the file beside the index that holds it."""

    file: str = Field(pattern=r"^\w[\w.-]*$")
    offsets: Sizes
    shape: Sizes


class StoredTensor(Foreign):
    """A tensor; its parts make up all of it."""

    dtype: DtypeName
    shape: Sizes
    parts: list[Part]

    @model_validator(mode="after")
    def _is_whole(self) -> StoredTensor:
        for part in self.parts:
            if not len(part.offsets) == len(part.shape) == len(self.shape):
                raise ValueError(f"a part of {part.shape} at {part.offsets} is not one of a tensor of {self.shape}")
            if any(begin + length > size for begin, length, size in zip(part.offsets, part.shape, self.shape, strict=True)):
                raise ValueError(f"a part of {part.shape} at {part.offsets} is not inside of a tensor of {self.shape}")
        if (found := sum(math.prod(part.shape) for part in self.parts)) != math.prod(self.shape):
            raise ValueError(f"its parts have {found} numbers, a tensor of {self.shape} has {math.prod(self.shape)}")
        return self


class Index(Foreign):
    """What `index.json` holds."""

    tensors: dict[str, StoredTensor]


class Entry(Foreign):
    """What the header of a safetensors file states of a tensor; offsets count from the end of the header."""

    dtype: DtypeName
    shape: Sizes
    data_offsets: Annotated[list[int], Field(min_length=2, max_length=2)]

    @model_validator(mode="after")
    def _fits(self) -> Entry:
        begin, end = self.data_offsets
        if begin < 0 or end - begin != math.prod(self.shape) * DTYPES[self.dtype].itemsize:
            raise ValueError(f"bytes {begin} to {end} are not those of a tensor of {self.shape} in {self.dtype}")
        return self


class _Header(Foreign):
    tensors: dict[str, Entry]


class Block(NamedTuple):
    """What a rank writes of a tensor."""

    dtype: torch.dtype
    shape: torch.Size
    offsets: torch.Size


def shard_name(rank: int) -> str:
    """The file of a rank."""
    return f"rank-{rank:05d}.safetensors"


def read_index(data: bytes) -> Index:
    """ForeignError when it is not what a checkpoint has."""
    return checked(Index, parse_json(data, INDEX_BYTES, INDEX_VALUES))


def write_header(blocks: Mapping[str, Block]) -> bytes:
    """The beginning of a file in which the tensors follow each other in this order."""
    places = {name: {"saved_offsets": list(block.offsets)} for name, block in blocks.items()}
    header: dict[str, object] = {"__metadata__": {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(places)}}
    end = 0
    for name, block in blocks.items():
        begin, end = end, end + math.prod(block.shape) * block.dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[block.dtype], "shape": list(block.shape), "data_offsets": [begin, end]}
    data = json.dumps(header, separators=(",", ":")).encode()
    data += b" " * (-len(data) % 8)  # so that the numbers are aligned
    return _LENGTH.pack(len(data)) + data


def read_header(file: RangeFile, first: bytes) -> dict[str, tuple[Entry, int]]:
    """Name -> what is stated of the tensor, and the place of its first byte in the file.

    Args:
        first: the beginning of the file (`first_read`).

    Raises:
        ValueError: it is not the header of a safetensors file of this length.
    """
    if len(first) < _LENGTH.size:
        raise ValueError(f"{file.name} has {file.size} bytes, which is no safetensors file")
    end = _LENGTH.size + _LENGTH.unpack_from(first)[0]
    if end > file.size:
        raise ValueError(f"{file.name} has {file.size} bytes, and states a header that ends at byte {end}")
    data = first[:end] + (file.read(len(first), end) if end > len(first) else b"")
    document = parse_json(data[_LENGTH.size :])
    tensors = {name: entry for name, entry in document.items() if name != "__metadata__"} if isinstance(document, dict) else document
    entries = checked(_Header, {"tensors": tensors}).tensors
    for name, entry in entries.items():
        if end + entry.data_offsets[1] > file.size:
            raise ValueError(f"{file.name} has {file.size} bytes, and {name!r} would end at byte {end + entry.data_offsets[1]}")
    return {name: (entry, end + entry.data_offsets[0]) for name, entry in entries.items()}


def first_read(file: RangeFile) -> tuple[RangeFile, int, int]:
    """What is read of a file before the length of its header is known."""
    return file, 0, min(file.size, _FIRST_READ)
