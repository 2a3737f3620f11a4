"""What a training step costs: the operations of its products and sums, and the bytes that torch has allocated
at its peak, of weights and optimizer states and of every storage that lives beside them.

On CPU storages are followed by a dispatch mode: it sees what each operator takes and gives, views and
DTensors by the storage under them, a freed or emptied storage as no bytes; what a kernel allocates inside of
itself it does not see. On CUDA the allocator is asked.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, mm_flop
from torch.utils.weak import WeakIdKeyDictionary


def peak_of_step(trainer: Any) -> int:
    """Bytes at the peak of one more step of a trainer that has made one, with all that its optimizer
    keeps."""
    batches = trainer.batch_generator(trainer.dataloader)
    states = [state for optimizer in trainer.optimizers.optimizers for state in optimizer.state.values()]
    kept = [local(value) for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    kept += [local(parameter) for part in trainer.model_parts for parameter in part.parameters()]
    kept += [copy for part in trainer.model_parts if part.pass_weights for copy in part.pass_weights.copies]
    kept += [local(buffer) for part in trainer.model_parts for buffer in part.buffers()]
    teacher = getattr(trainer.config.objective, "_teacher", None)
    if teacher is not None:
        kept += [local(value) for value in [*teacher.parameters(), *teacher.buffers()]]
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        trainer.train_step(batches)
        return torch.cuda.max_memory_allocated()
    with _Storages(kept) as storages:
        trainer.train_step(batches)
    return storages.peak + sum(tensor.nbytes for tensor in kept)


@contextmanager
def flop_counter() -> Iterator[FlopCounterMode]:
    """Counts operations, also those of products that are added to a tensor in place; attention is computed
    as products of matrices."""

    def product(kept: Any, a: Any, b: Any, out_shape: Any = None, **_: Any) -> int:
        return int(mm_flop(a, b))

    def elementwise(kept: Any, a: Any, b: Any, out_shape: Any = None, **_: Any) -> int:
        return 2 * math.prod(kept) if b == () else 0

    counted = {torch.ops.aten.addmm_: product, torch.ops.aten.addcmul_: elementwise}
    with (
        sdpa_kernel(SDPBackend.MATH),
        FlopCounterMode(display=False, custom_mapping=counted) as counter,
    ):
        yield counter


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class _Storages(TorchDispatchMode):
    """`peak`: bytes of all storages that were seen, but those of the tensors that are given."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.peak = 0
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary(
            {tensor.untyped_storage(): True for tensor in known}
        )
        self._kept = list(self._known)  # a storage's Python object has to live to be known again
        self._seen: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def __torch_dispatch__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            tensor = leaf._local_tensor if isinstance(leaf, DTensor) else leaf
            if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu":
                storage = tensor.untyped_storage()
                if storage not in self._known:
                    self._seen[storage] = True
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self._seen))
        return result
