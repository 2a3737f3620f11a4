"""The optimizer of a run inside torchtitan, and the form in which its state is stored.

Invariants:
- Hyperparameters always come from the spec, even after a checkpoint is loaded: they are never stored.
- The state consists of tensors, `state.<parameter>.<name>`. A number that an optimizer keeps for all
  parameters is stored under each of them.
- State exists from the start, all zeros, with counters as before the first step. torchtitan would create it
  by a step on zero gradients, which advances counters and warm-ups.
"""

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.components.optimizer.utils import init_optim_state

from apertus_model.optimizers.hook import ExtraLoss, Hooked
from apertus_model.optimizers.registry import CONSTRUCTORS, parameter_groups
from specs.capabilities import OptimizerName
from specs.optimizer import OptimizerSpec

logger = logging.getLogger(__name__)


class Optimizers(OptimizersContainer):
    """torchtitan's container of optimizers, with ours in the registry and the invariants above."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass

    def __init__(self, config: Config, *, model_parts: list[torch.nn.Module]) -> None:
        super().__init__(config, model_parts=model_parts)
        self._hooked = [optimizer for optimizer in self.optimizers if isinstance(optimizer, Hooked)]
        for optimizer in self.optimizers:
            init_optim_state(optimizer)
        for optimizer in self._hooked:
            optimizer.begin()
        for tensor in self.tensors().values():
            tensor.zero_()

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
        return CONSTRUCTORS[cast(OptimizerName, name)]

    @staticmethod
    def _build_param_groups(
        model: torch.nn.Module, param_group_configs: list[ParamGroupConfig], impl_kwargs: dict[str, Any]
    ) -> tuple[dict[str, list[dict[str, Any]]], dict[str, list[str]]]:
        """Builds the groups as torchtitan does, without empty ones, which torchtitan refuses: if only parts
        of a model are trained, some groups have no parameters."""
        left = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        groups = []
        for group in param_group_configs:
            own = {name for name in left if re.search(group.pattern, name)}
            groups += [group] if own else []
            left -= own
        return OptimizersContainer._build_param_groups(model, groups, impl_kwargs)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that the optimizers themselves have, not copied."""
        return {name: tensor for one in self.optimizers for name, tensor in _tensors(one).items()}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The whole state as tensors, those of `tensors` among them."""
        state = self.tensors()
        for optimizer in self._hooked:
            for name, parameter in _named(optimizer):
                further = optimizer.further_state(parameter)
                state |= {f"state.{name}.{key}": tensor for key, tensor in further.items()}
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        """Copies the tensors into the state; hyperparameters do not change. A schedule-free optimizer also
        sets the weights of the model to those that it trains.

        Raises:
            KeyError: a tensor is missing.
        """
        for name, tensor in self.tensors().items():
            tensor.copy_(state_dict[name])
        for optimizer in self._hooked:
            for name, parameter in _named(optimizer):
                keys = optimizer.further_state(parameter)
                further = {key: state_dict[f"state.{name}.{key}"] for key in keys}
                optimizer.load_further_state(parameter, further)

    def before_step(self, step: int, extra_pass: Callable[[ExtraLoss], None]) -> None:
        """Lets the optimizers do what they need before a step: see `Hooked.before_step`. Collective."""
        for optimizer in self._hooked:
            optimizer.before_step(step, extra_pass)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within this context, the model has the weights that are the result of training: the averaged
        weights of a schedule-free optimizer; other optimizers change nothing. Afterwards the model has the
        same bits as before."""
        with ExitStack() as stack:
            for optimizer in self._hooked:
                stack.enter_context(optimizer.averaged())
            yield


def _named(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for group in optimizer.param_groups:
        yield from zip(group["param_names"], group["params"], strict=True)


def _tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's own tensors. Those in lists are numbered: `state.<parameter>.<name>.<index>`."""
    tensors: dict[str, torch.Tensor] = {}
    for parameter_name, parameter in _named(optimizer):
        for name, value in optimizer.state[parameter].items():
            key = f"state.{parameter_name}.{name}"
            parts = {key: value}
            if isinstance(value, list):
                parts = {f"{key}.{index}": part for index, part in enumerate(value)}
            tensors |= {name: part for name, part in parts.items() if isinstance(part, torch.Tensor)}
    return tensors


def optimizer_config(spec: OptimizerSpec) -> Optimizers.Config:
    """torchtitan's config of a resolved optimizer spec."""
    return Optimizers.Config(implementation="foreach", param_groups=parameter_groups(spec))
