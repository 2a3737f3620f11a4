"""The weights of passes, on a process that computes alone, in another type than that of its weights.

FSDP rounds the weights of a layer each time it gathers them. A process that has all weights gathers nothing:
it rounds them once a step, and the passes of all micro-batches read the copies.

Invariant: losses and gradients have the same bits as with FSDP around one process.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class RoundedWeight(NamedTuple):
    """A parameter of a module, and the copy that passes read in its place."""

    parameters: dict[str, Any]  # of the module, by name
    name: str
    weight: nn.Parameter
    copy: nn.Parameter


class PassWeights:
    """Copies of the weights of `model` in `dtype`. A forward pass outside of `in_use` is an error."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._model, self._dtype = model, dtype
        self._places: list[RoundedWeight] = []
        self._used = False
        model.register_forward_pre_hook(self._check)

    def _check(self, *call: Any) -> None:
        assert self._used, f"the weights of this pass have to be {self._dtype}: enter `in_use` before it"

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Within this context, the model has the copies as its parameters, and a backward pass adds their
        gradients to those of the weights. Entering it rounds the weights that are trained; the others are
        rounded once, since nothing changes them after they are loaded. Can be nested."""
        if self._used:
            yield
            return
        if not self._places:
            self._make_copies()
        elif trained := [place for place in self._places if place.weight.requires_grad]:
            with torch.no_grad():
                torch._foreach_copy_([place.copy for place in trained], [place.weight for place in trained])
        for place in self._places:
            place.parameters[place.name] = place.copy
        self._used = True
        try:
            yield
        finally:
            for place in self._places:
                place.parameters[place.name] = place.weight
            self._used = False

    @property
    def copies(self) -> list[nn.Parameter]:
        """The copies, from the first pass on: until then, the weights may lie on the meta device."""
        return [place.copy for place in self._places]

    def _make_copies(self) -> None:
        copies: dict[nn.Parameter, nn.Parameter] = {}
        for module in self._model.modules():
            for name, weight in module._parameters.items():
                if weight is None:
                    continue
                if weight not in copies:  # modules may share a weight
                    copies[weight] = self._copy(weight)
                self._places.append(RoundedWeight(module._parameters, name, weight, copies[weight]))

    def _copy(self, weight: nn.Parameter) -> nn.Parameter:
        copy = nn.Parameter(weight.detach().to(self._dtype), requires_grad=weight.requires_grad)
        if weight.requires_grad:
            copy.register_post_accumulate_grad_hook(partial(_add_gradient, weight))
        return copy


def _add_gradient(weight: nn.Parameter, copy: Tensor) -> None:
    """Adds the gradient of a copy to that of the weight, in the type of the weight."""
    assert copy.grad is not None
    if weight.grad is None:
        weight.grad = copy.grad.to(weight.dtype)
    else:
        weight.grad += copy.grad
    copy.grad = None
