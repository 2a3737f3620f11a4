"""Counts what the operators of a step compute and move, and predicts their time from the rates of a GPU.

Each operator is a kernel, which reads its tensors and writes its result. In compiled layers, several
operators that a compiler fuses are one kernel.
"""

import functools
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry, mm_flop

from apertus_model.rehearsal.allocations import Allocations, maker, tensors_in
from apertus_model.rehearsal.classes import AROUND, CLASSES, NEAR, class_of, search
from apertus_model.rehearsal.rates import Rates, unmasked

aten = torch.ops.aten
ATTENTION = ("flash", "varlen", "flex", "dot_product", "efficient_attention")
# these read as many elements of their first tensor as they return
LOOKUPS = ("embedding", "index", "gather", "index_select")
# these write as many elements of their first tensor as their last tensor has
SCATTERS = ("index_put_", "_index_put_impl_", "scatter_", "scatter_add_", "embedding_dense_backward")
EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
NO_KERNEL = (
    *EMPTY, "detach", "lift_fresh", "_unsafe_view", "_reshape_alias", "set_", "is_same_size", "wait_tensor",
    "alias", "record_stream",
)  # fmt: skip
# these do not read the tensors that they write, or whose shape they take
OVERWRITING = ("copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_")
FILLING = ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
# FSDP's copy of a rank's shards into its part of a buffer, the first result, and the whole buffer is another
COPY_IN = "fsdp::all_gather_copy_in"
# these take a maximum or a sum
REDUCTIONS = ("max", "amax", "sum", "mean", "norm", "linalg_vector_norm")
ENGINE = torch.autograd.graph._engine_run_backward.__code__
FUSED = ("memory", "fused")  # kind and name of the kernels that a compiler makes of memory-bound operators


class Callers:
    """The classes of operators, by their names, or by the functions that call them.

    An operator of a backward pass whose callers have no class has that of the operator whose gradient
    autograd computes at that time.
    """

    def __init__(self) -> None:
        self._forward: dict[int, str | None] = {}  # class by the number of the node that autograd made

    def class_of(self, operator: str) -> str:
        """The class of an operator that runs now."""
        own = class_of(operator)
        around = own if own in AROUND else _class_of_caller()
        if torch.is_grad_enabled():
            self._forward.setdefault(torch._C._autograd._get_sequence_nr() - 1, around)
        elif around is None and (node := torch._C._current_autograd_node()) is not None:
            around = self._forward.get(node._sequence_nr())
        return own if own in NEAR else around or own


class Costs:
    """The costs of a step, summed by kind and name of the operator, and by class.

    Args:
        rates: of the GPU.
        allocations: follows the storages of the step, and has its time.
        ours: whether a tensor is on the GPU.
        fuses: whether layers are compiled. Then memory-bound operators between two products, attentions or
            collectives are one kernel, which reads the tensors that were there before it, and writes those
            that outlive it. An operator that needs the maximum or the sum of a whole tensor begins another
            kernel, which reads that tensor again.
        sparse_pairs: if heads choose what they see, the number of pairs of queries and keys that count for a
            head in a row, of which it computes half under the causal mask. None: all pairs.
    """

    def __init__(
        self,
        rates: Rates,
        allocations: Allocations,
        ours: Callable[[torch.Tensor], bool],
        fuses: bool,
        sparse_pairs: float | None = None,
    ) -> None:
        self.flops = Counter[tuple[str, str]]()
        self.moved = Counter[tuple[str, str]]()  # bytes
        self.seconds = defaultdict[tuple[str, str], float](float)
        self.calls = Counter[tuple[str, str]]()
        self.classes = defaultdict[str, float](float)  # seconds
        self._rates, self._allocations, self._ours, self._fuses = rates, allocations, ours, fuses
        self._sparse_pairs = sparse_pairs
        self._callers = Callers()
        self._fused = set[str]()  # classes of the fused operators
        self._read: dict[int, int] = {}  # bytes by storage that they read
        self._written: dict[int, int] = {}
        self._reduced = set[int]()  # storages that they reduce whole tensors to
        self._computed: dict[Any, list[int]] = {}  # by operator and its inputs: result storages
        self._same: dict[int, int] = {}  # a storage that was computed again -> the first one

    def clear(self) -> None:
        """Forgets what was counted."""
        for counter in (self.flops, self.moved, self.seconds, self.calls, self.classes):
            counter.clear()

    def count(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> float | None:
        """Counts an operator. Returns the seconds of a matrix product, None for others."""
        inputs, outputs = (
            list(filter(self._ours, part)) for part in read_and_written(func, args, kwargs, result)
        )
        if not outputs:
            return None
        of = self._callers.class_of(name)
        if getattr(func, "is_view", False) or name in NO_KERNEL:
            return None
        packet = getattr(func, "_overloadpacket", func)
        flops: int = 0
        if packet in (aten.addmm, aten.addmm_):
            flops = mm_flop(args[1].shape, args[2].shape)
        elif (formula := flop_registry.get(packet)) is not None:
            known = tree_map_only(FakeTensor, lambda tensor: getattr(tensor, "value", tensor), (args, kwargs))
            flops = formula(*known[0], **known[1], out_val=result)
        kind = "memory" if not flops else "attention" if any(part in name for part in ATTENTION) else "matrix"
        # the compiler does not see into a kernel of ours
        own = getattr(func, "namespace", "") != "aten"
        fusible = kind == "memory" and name not in SCATTERS and not own
        if self._fuses and fusible and maker() in ("activations", ""):
            if not self._again(func, args, kwargs, result):
                self._fuse(name, args, inputs, outputs)
                self._fused.add(of)
            return None
        self.end_fusion()
        # of the tensors that are multiplied; sums and statistics beside them are wider
        width = min((part.element_size() for part in tensors_in(args) if part.is_floating_point()), default=4)
        computed: float = flops
        if kind == "attention":
            queries, keys = _lengths(name, args)
            if self._sparse_pairs is None or "flex" not in name:
                computed = flops * unmasked(queries, keys)
            else:
                flops = round(flops * self._sparse_pairs / (queries * keys))
                computed = flops / 2
        of = {"matrix": "products", "attention": "attention"}.get(kind, of)
        seconds = self._add(kind, name, of, flops, _moved(name, inputs, outputs), width, computed)
        return seconds if kind == "matrix" else None

    def launched(self, kernel: Any, *args: Any) -> None:
        """Counts a Triton kernel: each of its tensors is read once, and written once unless the source only
        loads it."""
        self.end_fusion()
        loaded, stored = (set(re.findall(rf"tl\.{verb}\((\w+)", kernel.src)) for verb in ("load", "store"))
        given = dict(zip(kernel.arg_names, args, strict=False))
        moved = sum(size_of(tensor) for tensor in tensors_in(given.values()))
        moved += sum(size_of(tensor) for tensor in tensors_in(
            value for argument, value in given.items() if argument not in loaded - stored))  # fmt: skip
        name = kernel.fn.__name__
        self._add("memory", name, self._callers.class_of(name), 0, moved, 4)

    def end_fusion(self) -> None:
        """Counts the operators that were fused until now as one kernel."""
        if self._read or self._written:
            left = sum(size for number, size in self._written.items() if self._allocations.lives(number))
            of = min(self._fused, key=CLASSES.index)
            self._add(*FUSED, of, 0, sum(self._read.values()) + left, 4)
            self._read, self._written = {}, {}
            self._reduced.clear()
            self._fused.clear()

    def _add(
        self, kind: str, name: str, of: str, flops: int, moved: int, width: int, computed: float | None = None
    ) -> float:
        """Adds a kernel of class `of`; returns its seconds. `computed`: FLOPs that take time, if fewer."""
        key = kind, name
        self.calls[key] += 1
        self.flops[key] += flops
        self.moved[key] += moved
        seconds = self._rates.compute(flops if computed is None else computed, moved, kind, width)
        self.seconds[key] += seconds
        self.classes[of] += seconds
        self._allocations.seconds += seconds
        return seconds

    def _again(self, func: Any, args: Any, kwargs: Any, result: Any) -> bool:
        """Whether the same operator was applied to the same values before: the compiler computes it once in a
        forward pass, and once in a backward pass."""
        if func._schema.is_mutable:
            return False
        inputs = tuple(
            (self._same.get(number, number), tensor.shape, tensor.stride(), tensor._version)
            for tensor in tensors_in((args, kwargs.values()))
            for number in self._allocations.numbers([tensor])
        )
        others = tree_map_only(torch.Tensor, lambda tensor: None, (args, kwargs))
        key = func, torch._C._current_graph_task_id(), inputs, repr(others)
        numbers = self._allocations.numbers([result])
        first = self._computed.setdefault(key, numbers)
        self._same |= {number: old for number, old in zip(numbers, first, strict=True) if number != old}
        return bool(inputs) and first is not numbers

    def _fuse(self, name: str, args: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        if not self._reduced.isdisjoint(self._allocations.numbers(inputs)):
            self.end_fusion()
        if name in REDUCTIONS and not _along_rows(args):
            self._reduced.update(self._allocations.numbers(outputs))
        most = max(map(size_of, outputs))
        for tensor in inputs:
            number = self._allocations.number(tensor)
            if number is not None and number not in self._written:
                size = min(size_of(tensor), most) if name in LOOKUPS else size_of(tensor)
                self._read[number] = max(size, self._read.get(number, 0))
        for tensor in outputs:
            if (number := self._allocations.number(tensor)) is not None:
                self._written[number] = max(size_of(tensor), self._written.get(number, 0))


def _class_of_caller() -> str | None:
    """The class of the innermost running function that has one, up to autograd's engine."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code is ENGINE:
            return None
        if (kind := _class_of_function(frame.f_code, frame.f_globals.get("__name__", ""))) is not None:
            return kind
        frame = frame.f_back
    return None


@functools.cache
def _class_of_function(code: CodeType, module: str) -> str | None:
    return search(AROUND, [f"{module}.{code.co_qualname}"])


def _along_rows(args: Any) -> bool:
    """Whether a reduction has one result for each contiguous row in memory, which the same kernel can use."""
    tensor = next(tensors_in(args))
    axes = args[1] if len(args) > 1 else ()
    axes = [axes] if isinstance(axes, int) else axes
    return bool(axes) and all(tensor.stride(axis) == 1 for axis in axes)


def size_of(tensor: torch.Tensor) -> int:
    """The bytes of a tensor; an expanded tensor is no larger than its storage."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _lengths(name: str, args: Any) -> tuple[int, int]:
    """The numbers of queries and keys of a sequence; 1 and 1 except for FlexAttention, where they differ if
    ranks share a sequence."""
    if "flex" not in name:
        return 1, 1
    return args[0].shape[-2], args[1].shape[-2]


def read_and_written(
    func: Any, args: Any, kwargs: Any, result: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that an operator reads, and those that it writes: its results, or the arguments that it
    changes."""
    results, schema = list(tensors_in([result])), getattr(func, "_schema", None)
    operator = "" if schema is None else schema.name.removeprefix("aten::")
    if operator == COPY_IN:
        return list(args[0]), results[:1]
    if schema is None or not schema.is_mutable:
        return [] if operator in FILLING else list(tensors_in((args, kwargs.values()))), results
    given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
    changed = {part.name: part for part in schema.arguments if part.alias_info and part.alias_info.is_write}
    inputs = [value for name, value in given.items()
              if name not in changed or not (operator in OVERWRITING or changed[name].is_out)]  # fmt: skip
    # gradients of a fused optimizer are written only if they are scaled
    outputs = [value for name, value in given.items() if name in changed and name != "grads"]
    return list(tensors_in(inputs)), results or list(tensors_in(outputs))


def _moved(name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> int:
    """Bytes that an operator reads and writes."""
    sizes = [size_of(tensor) for tensor in (*inputs, *outputs)]
    if name in LOOKUPS:
        return sum(sizes[1:]) + sizes[-1]
    if name in SCATTERS:
        return 3 * min(sizes)
    return sum(sizes)
