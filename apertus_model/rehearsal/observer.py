"""Observes every operator of a step: runs it without values, and notes memory, work, collectives and waits.

Tensors on the CPU are computed. Tensors on the GPU are FakeTensors; those of integers or booleans that follow
from the batch keep their values beside them, so that what the host reads of labels and document boundaries is
true. Tensors that follow from weights have no values: a number among them is read as 1, and all of their
elements count as nonzero.
"""

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type as is_wrapper
from torch.utils._pytree import tree_map_only

from apertus_model.rehearsal.allocations import BLOCK, Allocations, tensors_in
from apertus_model.rehearsal.costs import EMPTY, Costs
from apertus_model.rehearsal.exchanges import NAMESPACES, Exchanges
from apertus_model.rehearsal.rates import Rates

aten = torch.ops.aten
LARGEST_KNOWN = 1 << 22  # elements of a tensor whose values are kept
WHOLE = (torch.int64, torch.int32, torch.bool)
OUR_CODE = ("/apertus_model/", "/torchtitan/")


class StepObserver(TorchDispatchMode):
    """A dispatch mode around the build and the step of a trainer. Counters count between `begin` and the end.
    `device`: "cuda", or "cpu" for real tensors; `fuses` and `sparse_pairs`: see `Costs`."""

    supports_higher_order_operators = True

    def __init__(
        self, rates: Rates, device: str, fuses: bool = False, sparse_pairs: float | None = None
    ) -> None:
        super().__init__()
        self.allocations = Allocations(BLOCK if device == "cuda" else 1)
        self.costs = Costs(rates, self.allocations, self._ours, fuses, sparse_pairs)
        self.exchanges = Exchanges(rates, self.allocations)
        self.waits = Counter[tuple[str, str]]()
        self._device = device
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._counts = False

    def __enter__(self) -> Any:
        # torch.tensor(..., device="cuda") is made on the CPU, and then goes through this mode
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    def begin(self) -> None:
        """Begins the step: forgets what was counted."""
        self.costs.clear()
        self.exchanges.clear()
        self.waits.clear()
        self.allocations.begin()
        self._counts = True

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """Within this context, operators are not part of the step, except for the memory that they leave."""
        counted, self._counts = self._counts, False
        try:
            with self.allocations.unseen():
                yield
        finally:
            self._counts = counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(is_wrapper(kind) for kind in types):  # DTensor, AsyncCollectiveTensor, torchao's float8
            return NotImplemented  # they call again, with the tensors that they hold
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **kwargs)  # DTensor asks for the shape of a result
        result = self._run(func, args, kwargs)
        name = _name(func)
        outputs = [tensor for tensor in tensors_in([result]) if self._ours(tensor)]
        for tensor in outputs:
            self.allocations.see(tensor, name)
        if self._counts:
            if getattr(func, "namespace", "") in NAMESPACES:
                self.costs.end_fusion()
                sizes = [self._bytes(value) for value in (*args, result)]
                self.exchanges.count(func, name, args, kwargs, result, sizes)
            else:
                product = self.costs.count(func, name, args, kwargs, result)
                self.exchanges.beside(name, args, result, product)
        return result

    # Values.

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        inputs = [*tensors_in(args), *tensors_in(kwargs.values())]
        fakes = [tensor for tensor in inputs if isinstance(tensor, FakeTensor)]
        target = kwargs.get("device")
        if not fakes and (target is None or torch.device(target).type != "cuda"):
            result = func(*args, **kwargs)
            if self._device == "cpu" and _name(func) in EMPTY:
                result.zero_()  # so that data that peers would send are finite
            return result
        if fakes:
            if func is aten._local_scalar_dense.default:
                return self._number(fakes[0])
            if func is aten.nonzero.default:
                return self._nonzero(fakes[0])
            if func is aten.record_stream.default:
                return None
            if func is aten._to_copy.default and target is not None and torch.device(target).type == "cpu":
                self._wait("copy")
                if (value := _value(fakes[0])) is not None:
                    return func(value, *args[1:], **kwargs)
        if _blocks(func, args, kwargs):
            self._wait("copy")
        if isinstance(func, torch._ops.HigherOrderOperator) or not fakes:
            with self._fake:
                result = func(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        results = [result] if isinstance(result, torch.Tensor) else result
        if (
            getattr(func, "namespace", "") == "aten"
            and isinstance(results, (list, tuple))
            and all(isinstance(tensor, FakeTensor) and tensor.dtype in WHOLE for tensor in results)
            and sum(tensor.numel() for tensor in results) <= LARGEST_KNOWN
            and all(_value(tensor) is not None for tensor in inputs)
        ):
            self._keep_values(func, args, kwargs, results)
        return result

    def _keep_values(self, func: Any, args: Any, kwargs: Any, results: Any) -> None:
        known = tree_map_only(torch.Tensor, _value, (args, kwargs))
        on_cpu = dict(known[1])
        if "device" in on_cpu:
            on_cpu["device"] = torch.device("cpu")
        values = func(*known[0], **on_cpu)
        for out, value in zip(results, [values] if isinstance(values, torch.Tensor) else values, strict=True):
            out.value = value

    def _number(self, tensor: FakeTensor) -> Any:
        self._wait("item")
        if (value := _value(tensor)) is not None:
            return value.item()
        return torch.ones((), dtype=tensor.dtype).item()

    def _nonzero(self, tensor: FakeTensor) -> torch.Tensor:
        self._wait("nonzero")
        value = _value(tensor)
        places = (torch.ones(tensor.shape) if value is None else value).nonzero()
        with self._fake:
            result = torch.empty(places.shape, dtype=torch.int64, device=tensor.device)
        result.value = places
        return result

    def read(self, tensor: torch.Tensor) -> Any:
        """The result of `tensor.tolist()`."""
        self._wait("tolist")
        value = _value(tensor)
        return (torch.ones(tensor.shape, dtype=tensor.dtype) if value is None else value).tolist()

    def _wait(self, what: str) -> None:
        if self._counts:
            self.waits[place(), what] += 1

    def _ours(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the GPU."""
        return isinstance(tensor, FakeTensor) if self._device == "cuda" else tensor.device.type == "cpu"

    def _bytes(self, value: Any) -> int:
        """The bytes of the tensors on the GPU in an argument."""
        ours = [tensor for tensor in tensors_in([value]) if self._ours(tensor)]
        return sum(tensor.numel() * tensor.element_size() for tensor in ours)

    def launched(self, kernel: Any, *args: Any) -> None:
        """Counts a Triton kernel."""
        if self._counts:
            self.costs.launched(kernel, *args)


def _name(func: Any) -> str:
    packet = getattr(func, "_overloadpacket", None)
    return packet.__name__ if packet is not None else func._name


def _blocks(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the host waits until a copy from its memory has reached the GPU."""
    if func is aten._to_copy.default:
        return not isinstance(args[0], FakeTensor) and not kwargs.get("non_blocking")
    if func is aten.copy_.default:
        to, source, *non_blocking = args
        return isinstance(to, FakeTensor) and not isinstance(source, FakeTensor) and not any(non_blocking)
    return False


def _value(tensor: torch.Tensor) -> torch.Tensor | None:
    """The values of a tensor, if they are known."""
    return getattr(tensor, "value", None) if isinstance(tensor, FakeTensor) else tensor


def place() -> str:
    """The innermost running line of our code, else of torchtitan."""
    frame: FrameType | None = sys._getframe(1)
    innermost = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if "/apertus_model/rehearsal/" not in name:
            for part in OUR_CODE:
                if part in name:
                    line = f"{name[name.rindex(part) + 1 :]}:{frame.f_lineno}"
                    if part == OUR_CODE[0]:
                        return line
                    innermost = innermost or line
        frame = frame.f_back
    return innermost or "torch"
