"""The optimizer of a run inside torchtitan, the form in which its state is stored, and its learning rate;
norms of weights and states.

Invariants:
- Hyperparameters always come from the spec, even after a checkpoint is loaded: they are never stored.
- The state consists of tensors, `state.<parameter>.<name>`. A number that an optimizer keeps for all
  parameters is stored under each of them.
- State exists from the start, all zeros, with counters as before the first step. torchtitan would create it
  by a step on zero gradients, which advances counters and warm-ups.
- The learning rate is a pure function of the step: after `seek(s)` and after every `step()`, all parameter
  groups hold the rate of the next step. Nothing of it is stored.
"""

import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.components.optimizer.utils import init_optim_state
from torchtitan.distributed import ParallelDims

from apertus_model.optimizers.hook import ExtraLoss, Hooked
from apertus_model.optimizers.registry import CONSTRUCTORS, parameter_groups
from specs.capabilities import OptimizerName
from specs.optimizer import OptimizerSpec

logger = logging.getLogger(__name__)

LAYER = re.compile(r"layers\.\d+")
INDICES = "0123456789."  # at the end of a state's name: its place in a list


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
        return {name: tensor for optimizer in self.optimizers for name, tensor in _tensors(optimizer).items()}

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
        sets the weights of the model to those that it trains. KeyError when a tensor is missing."""
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


class LearningRate(LRSchedulersContainer):
    """A scheduler that sets the rate `rate(steps done)` in every group of every optimizer, times the group's
    own `lr_ratio` if it has one."""

    @dataclass(kw_only=True, slots=True)
    class Config(LRSchedulersContainer.Config):
        rate: Callable[[int], float]  # number of steps done -> learning rate of the next step
        warmup_steps: int = 0  # torchtitan only prints it

        def build(self, *, optimizers: OptimizersContainer, training_steps: int) -> "LearningRate":
            """Called by torchtitan's Trainer."""
            return LearningRate(optimizers, self.rate)

    def __init__(self, optimizers: OptimizersContainer, rate: Callable[[int], float]) -> None:
        self.schedulers: list[LRScheduler] = []
        self._optimizers = optimizers
        self._rate = rate
        self.seek(0)

    def seek(self, steps_done: int) -> None:
        """Continues after `steps_done` steps of the stage."""
        self._steps_done = steps_done
        rate = self._rate(steps_done)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group.get("lr_ratio", 1.0)

    def step(self) -> None:
        """Called when an optimizer step is done."""
        self.seek(self._steps_done + 1)

    def get_metrics(self) -> dict[str, float]:
        """`{"lr": rate of the next step}`."""
        return {"lr": self._rate(self._steps_done)}

    def state_dict(self) -> dict[str, Any]:
        """An empty dict: there is nothing to remember."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Does nothing: there is no state."""


@torch.no_grad()
def norms(
    model_parts: Sequence[torch.nn.Module], optimizers: Optimizers, dims: ParallelDims
) -> dict[str, float]:
    """The L2 norm of each kind of tensor in each layer, of whole tensors in any layout: `weights/layers.0`,
    `exp_avg/embedding`. They show damage that loss and gradient do not show yet. The last normalisation
    belongs to `output`. Waits for the GPU. Collective."""
    groups: dict[str, list[torch.Tensor]] = {}
    for part in model_parts:
        for name, parameter in part.named_parameters():
            groups.setdefault(f"weights/{_layer(name)}", []).append(parameter)
    for name, state in optimizers.tensors().items():
        if state.ndim:  # not a counter
            kind = name.rstrip(INDICES).rsplit(".", 1)[-1]
            groups.setdefault(f"{kind}/{_layer(name)}", []).append(state)
    totals = [torch.nn.utils.get_total_norm(tensors, foreach=True) for tensors in groups.values()]
    whole = [total.full_tensor() if isinstance(total, DTensor) else total for total in totals]
    by_group = dict(zip(groups, torch.stack([total.float() for total in whole]).tolist(), strict=True))
    if (mesh := dims.get_optional_mesh("pp")) is not None:  # each stage has layers of its own
        stages = [by_group] * mesh.size()
        dist.all_gather_object(stages, by_group, group=mesh.get_group())
        by_group = {name: norm for stage in stages for name, norm in stage.items()}
    return by_group


def _layer(name: str) -> str:
    if match := LAYER.search(name):
        return match[0]
    return "embedding" if "tok_embeddings" in name else "output"
