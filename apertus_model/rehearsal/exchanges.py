"""Counts what a rank exchanges in a step: collectives, sends and receives, by kind and group, and their time.

Asynchronous tensor parallelism hides a part of this time: a product begins with the part of its input that
has arrived, and sends each part of its result while it computes the next.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from apertus_model.rehearsal.allocations import Allocations
from apertus_model.rehearsal.rates import Rates, hidden_seconds

NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
KINDS = (
    ("gather", "all-gather"), ("reduce_scatter", "reduce-scatter"), ("all_reduce", "all-reduce"),
    ("allreduce", "all-reduce"), ("alltoall", "all-to-all"), ("all_to_all", "all-to-all"),
    ("broadcast", "broadcast"), ("send", "send"), ("recv", "receive"), ("barrier", "barrier"),
)  # fmt: skip
# these move what they read, and compute nothing
COPIES = ("cat", "clone", "copy_", "_to_copy", "split_with_sizes_copy")


@dataclass
class Exchange:
    """The calls of one kind in one group of ranks."""

    ranks: list[int]
    calls: int = 0
    bytes: int = 0  # of the whole tensors
    asynchronous: int = 0  # calls that do not wait
    seconds: float = 0.0
    hidden_seconds: float = 0.0  # the part of `seconds` that runs beside products


SUMMED = ("calls", "bytes", "asynchronous", "seconds", "hidden_seconds")


@dataclass
class _Gather:
    """A gather whose results products read before they have arrived in full."""

    exchange: Exchange
    left: float  # seconds that nothing hides


class Exchanges:
    """The exchanges of a step, summed by kind and name of the group."""

    def __init__(self, rates: Rates, allocations: Allocations) -> None:
        self.sent: dict[tuple[str, str], Exchange] = {}
        self.overlapped = ""  # name of the group whose collectives run beside divided products
        self._rates, self._allocations = rates, allocations
        self._arriving: dict[int, _Gather] = {}  # by storage
        self._product: dict[int, float] = {}  # by storage: seconds of the product that made it

    def clear(self) -> None:
        """Forgets what was counted."""
        self.sent.clear()

    def count(self, func: Any, name: str, args: Any, kwargs: Any, result: Any, sizes: list[int]) -> None:
        """Counts a collective, send or receive. `sizes`: bytes on the GPU of the arguments and the result."""
        kind = next((kind for part, kind in KINDS if part in name), None)
        if kind is None:  # waits for a collective, or wraps its result
            if self.overlapped:
                self._pass_on(args, result)
            return
        whole = max(sizes, default=0)
        if not whole:  # only tensors on the CPU, between the hosts
            return
        values = (
            dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        )
        group = values.get("process_group")
        if isinstance(group, torch.ScriptObject):
            group = dist.ProcessGroup.unbox(group)
        if group is None:
            group = _resolve_process_group(values.get("group_name", values.get("tag", "")))
        ranks = dist.get_process_group_ranks(group)
        peers = ranks
        if kind in ("send", "receive"):
            other = ranks[values.get("dst", values.get("src", 0))]
            peers = [dist.get_rank(), other]
        seconds = self._rates.collective(kind, whole, peers)
        exchange = self.sent.setdefault((kind, group.group_name), Exchange(ranks))
        exchange.calls += 1
        exchange.bytes += whole
        exchange.asynchronous += bool(values.get("async_op", func.namespace != "c10d"))
        exchange.seconds += seconds
        if group.group_name == self.overlapped:
            if kind == "all-gather":
                gather = _Gather(exchange, seconds)  # one for all results
                self._arriving |= dict.fromkeys(self._allocations.numbers([result]), gather)
            elif kind == "reduce-scatter":
                numbers = self._allocations.numbers(args)
                product = max(self._product.get(number, 0.0) for number in numbers)
                exchange.hidden_seconds += hidden_seconds(seconds, product, len(ranks))

    def beside(self, name: str, args: Any, result: Any, product: float | None) -> None:
        """Notes an operator. `product`: the seconds of a matrix product, which hides its input's gather."""
        if not self.overlapped:
            return
        if name in COPIES:
            self._pass_on(args, result)
        if product is None:
            return
        self._product |= dict.fromkeys(self._allocations.numbers([result]), product)
        for number in self._allocations.numbers(args):
            if gather := self._arriving.get(number):
                hidden = hidden_seconds(gather.left, product, len(gather.exchange.ranks))
                gather.exchange.hidden_seconds += hidden
                gather.left -= hidden

    def _pass_on(self, args: Any, result: Any) -> None:
        """Treats a copy like its original."""
        tables: tuple[dict[int, Any], ...] = self._arriving, self._product
        for known in tables:
            for number in self._allocations.numbers(args):
                if number in known:
                    known |= dict.fromkeys(self._allocations.numbers([result]), known[number])
