"""Counts what torch allocates: the largest tensor, and the bytes that live at the same time."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


class LiveMemory(TorchDispatchMode):
    """While active: `largest`, elements of the largest new tensor; `peak`, bytes of new storages that
    lived together."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.peak = 0
        self._before: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._live: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage() not in self._live:
                self._before[leaf.untyped_storage()] = True
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage() not in self._before:
                self._live[leaf.untyped_storage()] = leaf.untyped_storage().nbytes()
                self.largest = max(self.largest, leaf.untyped_storage().nbytes() // leaf.element_size())
        self.peak = max(self.peak, sum(self._live.values()))
        return result
