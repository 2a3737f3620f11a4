"""Records which tensors live when: the bytes at the peak of a step, by kind and by tensor.

A storage counts from the operator that makes it to its end, in the blocks of CUDA's allocator; views and
DTensors count as their storage. The kind of a storage is what the step uses it for (a
weight, a gradient, a state), else the code that made it.

Invariant: `peak` is exact: every change is kept, and the changes of the step are replayed from its begin.
"""

import contextlib
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch

from apertus_model.rehearsal.patches import SUMS

BLOCK = 512  # bytes; c10/core/AllocatorConfig.h: kMinBlockSize
TRAINER, PIPELINES = "/apertus_model/trainer/", "/torch/distributed/pipelining/"
# A storage was made by the innermost of these on the stack.
MAKERS = (
    ("/torch/distributed/fsdp/", "communication"),
    (PIPELINES, "communication"),
    ("/apertus_model/losses/", "other"),
    ("/apertus_model/optimizers/", "other"),
    ("/torch/optim/", "other"),
    ("/apertus_model/model/pass_weights.py", "other"),
    ("/apertus_model/model/", "activations"),
    ("/torchtitan/models/", "activations"),
    (TRAINER, "other"),
)


class Made(NamedTuple):
    """The facts about a storage that are known when it is made."""

    operator: str
    shape: tuple[int, ...]
    dtype: str
    kind: str


class LiveStorage(NamedTuple):
    """A storage at the peak."""

    origin: Made
    kind: str
    bytes: int


class Allocations:
    """A record of storages and their changes in size. Bytes are rounded up to `block`."""

    def __init__(self, block: int = BLOCK) -> None:
        self.seconds = 0.0  # of computation in the step until now, which the observer predicts
        self._block = block
        self._known: dict[int, int] = {}  # address of a storage -> its number
        self._sizes: dict[int, int] = {}  # of living storages, by number
        self._made: list[Made] = []
        self._ends: dict[int, weakref.ref[Any]] = {}
        self._changes: list[tuple[int, int]] = []  # number of the storage, change in bytes
        self._times: list[float] = []  # of the changes
        self._begin = 0
        self._unseen: list[range] = []  # changes that cannot be the peak
        self._kinds: dict[int, str] = {}

    def see(self, tensor: torch.Tensor, operator: str) -> None:
        """Notes the storage of a tensor if it is new."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._known:
            return
        number = len(self._made)
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        self._made.append(Made(operator, shape, dtype, _kind()))
        self._known[address] = number
        self._ends[number] = weakref.ref(storage, lambda _: self._end(address, number))
        self._set(number, storage.nbytes())

    def resized(self, storage: Any) -> None:
        """Notes the new size of a storage."""
        if (number := self._known.get(storage._cdata)) is not None:
            self._set(number, storage.nbytes())

    def name(self, tensors: Iterable[torch.Tensor], kind: str) -> None:
        """Records what tensors are used for."""
        for tensor in tensors:
            if (number := self._known.get(tensor.untyped_storage()._cdata)) is not None:
                self._kinds.setdefault(number, kind)

    def number(self, tensor: torch.Tensor) -> int | None:
        """The number of the storage of a tensor; None for a storage that was not seen."""
        return self._known.get(tensor.untyped_storage()._cdata)

    def numbers(self, values: Any) -> list[int]:
        """The numbers of the storages of the tensors among values."""
        numbers = map(self.number, tensors_in(values))
        return [number for number in numbers if number is not None]

    def lives(self, number: int) -> bool:
        """Whether a storage has not ended."""
        return number in self._ends

    def begin(self) -> None:
        """Begins the step: earlier changes have no part in the peak."""
        self._begin, self.seconds = len(self._changes), 0.0

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """Within this context, storages that do not outlive it have no part in the peak."""
        begin = len(self._changes)
        yield
        self._unseen.append(range(begin, len(self._changes)))

    def peak(self) -> list[LiveStorage]:
        """The storages that lived when the number of living bytes was largest."""
        now = sum(size for _, size in self._changes[: self._begin])
        most, at = now, self._begin
        unseen = {index for changes in self._unseen for index in changes}
        for index in range(self._begin, len(self._changes)):
            now += self._changes[index][1]
            if now > most and index not in unseen:
                most, at = now, index + 1
        sizes = Counter[int]()
        for number, size in self._changes[:at]:
            sizes[number] += size
        return [
            LiveStorage(self._made[number], self._kinds.get(number, self._made[number].kind), size)
            for number, size in sizes.items()
            if size
        ]

    def moments(self, pieces: int) -> list[tuple[float, Counter[str]]]:
        """Time and bytes by kind at the fullest moment of each of the step's pieces of equal time."""
        now, fullest = Counter[str](), dict[int, tuple[float, Counter[str]]]()
        unseen = {index for changes in self._unseen for index in changes}
        length = self.seconds / pieces or 1.0
        for index, (number, size) in enumerate(self._changes):
            now[self._kinds.get(number, self._made[number].kind)] += size
            if index < self._begin - 1 or index in unseen:
                continue
            time = self._times[index] if index >= self._begin else 0.0
            piece = min(int(time / length), pieces - 1)
            if piece not in fullest or now.total() > fullest[piece][1].total():
                fullest[piece] = time, Counter(now)
        return list(fullest.values())

    def _set(self, number: int, size: int) -> None:
        size = -(-size // self._block) * self._block
        if change := size - self._sizes.get(number, 0):
            self._sizes[number] = size
            self._note(number, change)

    def _end(self, address: int, number: int) -> None:
        if self._known.get(address) == number:
            del self._known[address]
        del self._ends[number]
        if size := self._sizes.pop(number, 0):
            self._note(number, -size)

    def _note(self, number: int, change: int) -> None:
        self._changes.append((number, change))
        self._times.append(self.seconds)


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors among values, and in tuples and lists among them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_in(value)


def _kind() -> str:
    """The kind of a storage made now. The backward pass drops what it makes, except for communication."""
    kind = maker() or "other"
    return "other" if kind == "activations" and torch._C._current_graph_task_id() != -1 else kind


def maker() -> str:
    """The kind of the code that runs now, by `MAKERS`. It is "" for a formula of autograd, whether the
    trainer or a pipeline called `backward`, and for code elsewhere."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        for path, kind in MAKERS:
            if path in code.co_filename:
                if path in (TRAINER, PIPELINES) and torch._C._current_graph_task_id() != -1:
                    return ""
                return "gradients" if kind == "communication" and code.co_name in SUMS else kind
        frame = frame.f_back
    return ""
