"""Where the numbers of a tensor lie in what `torch.save` makes of it, found without running any of it.

That is a zip archive without compression: a pickle that describes the tensor, a few small records, the bytes of the tensor's storage, and
a directory. The first two lie in its head, which is short, so a part of a tensor is read by position once the head is known.

Invariant: nothing of torch is called to interpret the pickle: the names that it may use stand for values of this module.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from collections.abc import Sequence
from typing import Any

import torch

LONGEST = 2**16
"""Bytes around the numbers; torch needs about 1,300."""
_STORAGES = {
    "BFloat16Storage": torch.bfloat16,
    "BoolStorage": torch.bool,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
}


def first_byte(head: bytes | bytearray, size: Sequence[int], dtype: torch.dtype) -> int:
    """Where the numbers of a tensor begin, row by row.

    Args:
        head: the first bytes of what was saved, at least up to there.
        size, dtype: of the tensor, as they should be.

    Raises:
        ValueError: the head is not that of such a tensor.
    """
    try:
        storage, offset, saved, strides = _Description(io.BytesIO(head[_record(head, b"data.pkl") :])).load()[:4]
        kind, saved_as, key, _, count = storage
    except Exception as error:  # a pickle that is none may fail with anything
        raise ValueError(f"no description of a tensor ({type(error).__name__}: {error})") from error
    found = (kind, key, saved_as, count, offset, tuple(saved))
    if found != (wanted := ("storage", "0", dtype, math.prod(size), 0, tuple(size))):
        raise ValueError(f"{found} in place of {wanted}")
    if any(stride != step for stride, step, length in zip(strides, _steps(size), size, strict=True) if length > 1):
        raise ValueError(f"strides {strides}, where rows follow each other")
    return _record(head, b"data/0")


class _Description(pickle.Unpickler):
    """Makes tuples of what the pickle would call."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda *arguments: arguments
        if (module, name) == ("collections", "OrderedDict"):
            return lambda: None  # hooks; a new function each time, on which nobody can leave anything
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        return pid


def _record(head: bytes | bytearray, name: bytes) -> int:
    """Where the content of a record of the archive begins; ValueError where there is none (PKWARE, APPNOTE 4.3.7)."""
    found = re.search(rb"PK\x03\x04.{4}\0\0.{16}(..)(..)[^/]+/" + re.escape(name), head, re.DOTALL)
    if found is None:
        raise ValueError(f"no record {name.decode()}")
    lengths = [int.from_bytes(part, "little") for part in found.groups()]
    return found.start() + 30 + sum(lengths)


def _steps(size: Sequence[int]) -> tuple[int, ...]:
    """Strides of a tensor whose numbers lie row by row."""
    return tuple(math.prod(size[place + 1 :]) for place in range(len(size)))
