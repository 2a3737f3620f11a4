"""The optimizers of `pytorch_optimizer`, adapted to checkpoints of tensors.

That package keeps numbers that belong to the state (steps done, sums) in its parameter groups, and starts
some states from the first gradient or from the weights. Here those numbers can be read and set. State is
created before the first step, to read a checkpoint into; without one, that step drops it.

Invariants:
- The next update depends only on weights, gradients, hyperparameters, `counters()` and the tensors of the
  state.
- The package is imported when one of its optimizers is asked for, and not before: it takes a second.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from apertus_model.optimizers.hook import Hooked
from specs.capabilities import OPTIMIZERS

Groups = list[dict[str, Any]]


class WithCounters(Hooked):
    """The base of the classes below, placed before the package's own class. `COUNTERS`: name of each counter
    -> its value before the first step."""

    COUNTERS: ClassVar[Mapping[str, float]] = {"step": 0}

    @property
    def begun(self) -> bool:
        """Whether the optimizer has made a step, here or before the checkpoint that was read."""
        return bool(self.param_groups[0].get("step", 0) != self.COUNTERS["step"])

    def begin(self) -> None:
        self.set_counters(self.COUNTERS)

    def counters(self) -> dict[str, float]:
        """The numbers in the state, which are the same for all parameters."""
        group = self.param_groups[0]
        return {name: float(group.get(name, first)) for name, first in self.COUNTERS.items()}

    def set_counters(self, values: Mapping[str, float]) -> None:
        """Sets the counters to `values`."""
        for group in self.param_groups:
            for name, first in self.COUNTERS.items():
                current = group.get(name, first)
                group[name] = (
                    torch.full_like(current, values[name])
                    if isinstance(current, torch.Tensor)
                    else type(first)(values[name])
                )

    def further_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """The counters, which are stored with every parameter: float64 scalars."""
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in self.counters().items()}

    def load_further_state(self, parameter: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        self.set_counters({name: tensors[name].item() for name in self.COUNTERS})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Makes the package's update. Before the first one, drops the state."""
        if not self.begun:
            self.state.clear()
        super().step()


class OnWholeTensors(WithCounters):
    """Base for updates whose operators DTensor lacks. Every process must have all weights in full: there is
    one process, or all are replicas."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Makes the package's update on the plain tensors inside DTensors. States are plain tensors."""
        groups = [group["params"] for group in self.param_groups]
        plain = {parameter: _plain(parameter) for parameters in groups for parameter in parameters}
        self._rekey(plain)
        for group, parameters in zip(self.param_groups, groups, strict=True):
            group["params"] = [plain[parameter] for parameter in parameters]
        try:
            super().step()
        finally:
            for group, parameters in zip(self.param_groups, groups, strict=True):
                group["params"] = parameters
            self._rekey({tensor: parameter for parameter, tensor in plain.items()})

    def _rekey(self, names: Mapping[torch.Tensor, torch.Tensor]) -> None:
        state = {names[tensor]: value for tensor, value in self.state.items()}
        self.state.clear()
        self.state.update(state)


def _plain(parameter: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return parameter
    tensor = parameter.to_local().detach()
    assert tensor.shape == parameter.shape, "specs.optimizer.refused_layout refuses sharded weights"
    tensor.grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else None
    return tensor


def _of_package(name: str, base: type[WithCounters] = WithCounters, **attributes: Any) -> Any:
    """The package's class of that name, with `base` before it."""
    import pytorch_optimizer

    return type(name, (base, getattr(pytorch_optimizer, name)), attributes)


def adopt(groups: Groups) -> Optimizer:
    """ADOPT with clipping (arXiv 2411.02853, algorithm 2) and decoupled decay. The paper's first step, which
    only computes v, has number 0; the package counts it as 1, which would shift the clipping bound t^0.25 by
    one step. Weights are decayed in that step too, as in the authors' code."""
    for group in groups:
        group["foreach"] = False  # DTensor lacks operators of that path
    make = _of_package("ADOPT")
    return make(groups, clip_lambda=lambda step: (step - 1) ** 0.25, weight_decouple=True)


def lion(groups: Groups) -> Optimizer:
    """Lion (arXiv 2302.06675)."""
    return _of_package("Lion")(groups)


def signum(groups: Groups) -> Optimizer:
    """Signum (arXiv 1802.04434): the sign of an average of gradients."""
    return _of_package("SignSGD")(groups)


def mars(groups: Groups) -> Optimizer:
    """MARS-AdamW, the approximate form (arXiv 2411.10438): gradients of matrices are corrected by those of
    the previous step; all parameters are decayed alike. The package waits for the GPU once per parameter."""
    for group in groups:
        group |= {"weight_decay_1d": group["weight_decay"], "foreach": False}  # as for ADOPT
    return _of_package("MARS")(groups)


def soap(groups: Groups) -> Optimizer:
    """SOAP (arXiv 2409.11321). Its first step only makes the eigenbases; longer sides of a matrix than
    `largest_side` have none."""
    return _of_package("SOAP", OnWholeTensors)(groups, max_precondition_dim=OPTIMIZERS["soap"].largest_side)


def prodigy(groups: Groups) -> Optimizer:
    """Prodigy (arXiv 2306.06101). The package counts `step` from 1."""
    counters = {"step": 1, "d": 1e-6, "d_max": 1e-6, "d_numerator": 0.0}
    return _of_package("Prodigy", OnWholeTensors, COUNTERS=counters)(groups)


class Averaging(WithCounters):
    """A schedule-free optimizer: the weights in training are y = (1 - b1) z + b1 x; the result is x, a
    weighted average of all z."""

    COUNTERS: ClassVar[Mapping[str, float]] = {"step": 0, "weight_sum": 0.0, "lr_max": -1.0}

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._aside: dict[torch.Tensor, torch.Tensor] = {}  # the y of each weight that is x now

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within this context every weight is x; before the first step, it is what it was. Afterwards it has
        the same bits as before."""
        with torch.no_grad():
            for group in self.param_groups if self.begun else []:
                for parameter in group["params"]:
                    if "z" in self.state[parameter]:
                        self._aside[parameter] = parameter.detach().clone()
                        parameter.lerp_(self.state[parameter]["z"], 1 - 1 / group["betas"][0])
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, trained in self._aside.items():
                    parameter.copy_(trained)
            self._aside = {}

    def further_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        trained = self._aside.get(parameter, parameter)
        return super().further_state(parameter) | {"y": trained.detach().clone()}

    @torch.no_grad()
    def load_further_state(self, parameter: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        """Also sets the weight to the one in training."""
        super().load_further_state(parameter, tensors)
        parameter.copy_(tensors["y"])


def schedule_free_adamw(groups: Groups) -> Optimizer:
    """Schedule-free AdamW (arXiv 2405.15682)."""
    return _of_package("ScheduleFreeAdamW", Averaging)(groups)
