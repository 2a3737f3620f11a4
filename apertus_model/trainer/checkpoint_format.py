"""The files of a checkpoint: safetensors, and an index in JSON.

    rank-00000.safetensors    rank 0's part of every tensor; any reader of safetensors can open it
    index.json                {"tensors": {NAME: {"dtype": "F32", "shape": [8, 4], "parts": [
                                  {"file": "rank-00000.safetensors", "offsets": [0, 0], "shape": [4, 4]},
                                  ...]}}}

A part is a block of a tensor that begins at `offsets`. The header of a file also states the offsets of its
parts, under `__metadata__` and in the form of torch.distributed.checkpoint's Hugging Face storage, which can
therefore read these folders.

Invariant: reading accepts only JSON within the bounds of `specs.foreign` that fits the models below, and only
tensors within their file. Equal tensors give equal bytes.
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
INDEX_BYTES, INDEX_VALUES = 2**31, 2**28  # limits, enough for 20 million parts
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
_LENGTH = struct.Struct("<Q")  # length of the header that follows it
_FIRST_READ = 2**12  # bytes read from a file before the length of its header is known

DtypeName = Literal["BF16", "BOOL", "F16", "F32", "F64", "I32", "I64"]
Sizes = list[Annotated[int, Field(ge=0, lt=2**63)]]


class StoredBlock(Foreign):
    """A block of a tensor."""

    file: str = Field(pattern=r"^\w[\w.-]*$")  # the file that holds it, in the folder of the index
    offsets: Sizes  # where the block begins in the tensor
    shape: Sizes  # of the block


class StoredTensor(Foreign):
    """A tensor as the index describes it."""

    dtype: DtypeName
    shape: Sizes  # of the whole tensor
    parts: list[StoredBlock]  # together they are the whole tensor

    @model_validator(mode="after")
    def _is_whole(self) -> StoredTensor:
        for part in self.parts:
            if not len(part.offsets) == len(part.shape) == len(self.shape):
                raise ValueError(
                    f"a part of {part.shape} at {part.offsets} and its tensor of {self.shape} have different"
                    " numbers of dimensions"
                )
            if any(
                begin + length > size
                for begin, length, size in zip(part.offsets, part.shape, self.shape, strict=True)
            ):
                raise ValueError(
                    f"a part of {part.shape} at {part.offsets} is not inside its tensor of {self.shape}"
                )
        if (numbers := sum(math.prod(part.shape) for part in self.parts)) != math.prod(self.shape):
            raise ValueError(
                f"its parts have {numbers} numbers, a tensor of {self.shape} has {math.prod(self.shape)}"
            )
        return self


class CheckpointIndex(Foreign):
    """The content of `index.json`."""

    tensors: dict[str, StoredTensor]  # by name


class TensorEntry(Foreign):
    """A tensor as the header of a safetensors file describes it."""

    dtype: DtypeName
    shape: Sizes
    # first byte and end, counted from the end of the header
    data_offsets: Annotated[list[int], Field(min_length=2, max_length=2)]

    @model_validator(mode="after")
    def _fits(self) -> TensorEntry:
        begin, end = self.data_offsets
        if begin < 0 or end - begin != math.prod(self.shape) * DTYPES[self.dtype].itemsize:
            raise ValueError(
                f"bytes {begin} to {end} are not those of a tensor of {self.shape} in {self.dtype}"
            )
        return self


class _Header(Foreign):
    tensors: dict[str, TensorEntry]


class Block(NamedTuple):
    """The part of a tensor that a rank writes."""

    dtype: torch.dtype
    shape: torch.Size  # of the part
    offsets: torch.Size  # where the part begins in the tensor


def shard_name(rank: int) -> str:
    """Name of the file that a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def read_index(data: bytes) -> CheckpointIndex:
    """Parses the content of `index.json`. ForeignError when it is not valid."""
    return checked(CheckpointIndex, parse_json(data, INDEX_BYTES, INDEX_VALUES))


def write_header(blocks: Mapping[str, Block]) -> bytes:
    """The header of a file in which these blocks follow in this order."""
    places = {name: {"saved_offsets": list(block.offsets)} for name, block in blocks.items()}
    header: dict[str, object] = {
        "__metadata__": {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(places)}
    }
    end = 0
    for name, block in blocks.items():
        begin, end = end, end + math.prod(block.shape) * block.dtype.itemsize
        header[name] = {
            "dtype": DTYPE_NAMES[block.dtype],
            "shape": list(block.shape),
            "data_offsets": [begin, end],
        }
    data = json.dumps(header, separators=(",", ":")).encode()
    data += b" " * (-len(data) % 8)  # so that the numbers are aligned
    return _LENGTH.pack(len(data)) + data


def read_header(file: RangeFile, first: bytes) -> dict[str, tuple[TensorEntry, int]]:
    """The entry of every tensor, by name, and the position of its first byte in the file. `first`: the file's
    first bytes, as many as `first_read` asks for. ValueError when the header is not valid, or describes a
    longer file."""
    if len(first) < _LENGTH.size:
        raise ValueError(f"{file.name} has {file.size} bytes, too few for a safetensors file")
    end = _LENGTH.size + _LENGTH.unpack_from(first)[0]
    if end > file.size:
        raise ValueError(f"{file.name} has {file.size} bytes, but states a header that ends at byte {end}")
    data = first[:end] + (file.read(len(first), end) if end > len(first) else b"")
    document = parse_json(data[_LENGTH.size :])
    if isinstance(document, dict):
        document.pop("__metadata__", None)
    entries = checked(_Header, {"tensors": document}).tensors
    for name, entry in entries.items():
        if end + entry.data_offsets[1] > file.size:
            raise ValueError(
                f"{file.name} has {file.size} bytes, but {name!r} would end at byte"
                f" {end + entry.data_offsets[1]}"
            )
    return {name: (entry, end + entry.data_offsets[0]) for name, entry in entries.items()}


def first_read(file: RangeFile) -> tuple[RangeFile, int, int]:
    """The range (file, begin, end) to read before the length of the header is known."""
    return file, 0, min(file.size, _FIRST_READ)
