"""Runs the layers of a model in the order of a schedule (`specs.layer_schedule`) that is not the plain stack.

    sum of step s = w_s0 x_a + w_s1 x_b + ...        x_a, x_b, ...: the states that the step names
    layers i, j, ... of one step: x' = x + A_i(x) + A_j(x) + ..., then x' + F_i(x') + F_j(x') + ...
    layer of a step that reads others: queries of this step; keys and values of those steps and of this one

Keys and values that later steps read are results of a layer and arguments of later ones, so that
recomputation and FSDP treat them like the states. The layers of one step leave what they add as partial sums
of the tensor-parallel ranks, which are added up once for all these layers. Weighted sums are computed state
by state in float32 at least and rounded once; the forward pass keeps no products.

Invariant: a schedule's parameters are outside the layers: `schedule.sums.<step>.weight`, the weights of a
sum, of shape (number of states,); `schedule.norm.weight` (dim,), the norm of all steps that have one. So
layers are wrapped, compiled and recomputed as in the plain stack, with the same names.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import spmd_types as spmd
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Shard
from torchtitan.models.common import RMSNorm
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.protocols.module import Module, ModuleDict
from torchtitan.protocols.sharding import ShardingConfig

from apertus_model.model.attention import KeysValues
from specs.layer_schedule import INPUT, LayerStep


class WeightedSum(Module):
    """The weighted sum of states, each (batch, seq_len, dim), with one trained weight per state, the same for
    all tokens and dimensions."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        states: int

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.states))

    def forward(self, *states: torch.Tensor) -> torch.Tensor:
        """The weighted sum of `states`, in their common shape, dtype and layout."""
        first = states[0]
        if not isinstance(first, DTensor):
            return _WeightedSum.apply(self.weight, *states)
        assert isinstance(self.weight, DTensor)
        # If each rank has a part of the sequence, each has a part of the sum that is the weights' gradient.
        split = [Partial() if isinstance(placement, Shard) else placement for placement in first.placements]
        weight = self.weight.to_local(grad_placements=split)
        local = _WeightedSum.apply(weight, *(state.to_local() for state in states))
        return DTensor.from_local(local, first.device_mesh, first.placements, run_check=False)


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, *states: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight, *states)
        dtype = states[0].dtype
        wide = torch.promote_types(dtype, torch.float32)
        total = torch.zeros_like(states[0], dtype=wide)
        for factor, state in zip(weight.to(wide).unbind(), states, strict=True):
            total.addcmul_(state, factor)
        return total.to(dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight, *states = ctx.saved_tensors
        (gradient,) = gradients
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        to_weight = None
        if ctx.needs_input_grad[0]:
            to_weight = torch.stack([(wide * state).sum() for state in states]).to(weight.dtype)
        factors = weight.to(wide.dtype).unbind()
        return to_weight, *((wide * factor).to(gradient.dtype) for factor in factors)


Branch = Literal["attention", "feed_forward"]
"""Half of a layer: a part that adds to the residual stream by itself."""


class Joined(Module):
    """What several layers add to the states, summed: (batch, seq_len, dim) in the layout of the states."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(self, *added: torch.Tensor) -> torch.Tensor:
        return functools.reduce(torch.add, added)


class LayerSchedule(Module):
    """The steps, and the weights of their sums."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        steps: Sequence[LayerStep]
        sums: dict[int, WeightedSum.Config]  # by the number of the step, counted from 1
        joined: Joined.Config
        norm: RMSNorm.Config | None  # of the outputs of steps that are normed

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.steps = config.steps
        self.sums = ModuleDict(
            {str(number): config_of_sum.build() for number, config_of_sum in config.sums.items()}
        )
        self.joined = config.joined.build()
        self.norm = None if config.norm is None else config.norm.build()
        self.read_later = {number for step in config.steps for number in step.reads}

    def forward(self, layers: nn.ModuleDict, embedding: torch.Tensor, *arguments: Any) -> torch.Tensor:
        """The state that the last step passes on, (batch, seq_len, dim) like the embedding. `arguments` are
        the arguments of every layer after its input."""
        states = [embedding]
        kept: dict[int, KeysValues] = {}
        hidden = embedding
        for number, step in enumerate(self.steps, 1):
            own = [layers[str(layer)] for layer in step.layers]
            states.append(self.run(number, own, kept, hidden, *arguments))
            hidden = self.passed_on(number, states, hidden)
        return hidden

    @property
    def forms(self) -> int:
        """The number of ways in which layers are called, each with its own graph if layers are compiled."""
        whole = {(len(step.reads), number in self.read_later) for number, step in enumerate(self.steps, 1)}
        return len(whole) + len(get_args(Branch)) * any(step.beside for step in self.steps)

    def run(
        self,
        number: int,
        layers: Sequence[nn.Module],
        kept: dict[int, KeysValues],
        hidden: torch.Tensor,
        *arguments: Any,
    ) -> torch.Tensor:
        """The output of the step with this number, which has these layers. `kept`: keys and values of earlier
        steps that later steps read; those of this step are added."""
        step = self.steps[number - 1]
        if step.beside:
            for branch in get_args(Branch):
                hidden = hidden + self.joined(*(layer(hidden, *arguments, branch=branch) for layer in layers))
        elif step.reads or number in self.read_later:
            earlier = [kept[other] for other in step.reads]
            hidden, own = layers[0](hidden, *arguments, earlier=earlier)
            if number in self.read_later:
                kept[number] = own
        else:
            hidden = layers[0](hidden, *arguments)
        return hidden if self.norm is None or not step.normed else self.norm(hidden)

    def passed_on(self, number: int, states: Sequence[torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        """The state that the step with this number passes on: its output, which is the last of `states`, or a
        weighted sum of states. `hidden`: the input of the step."""
        summed = self.steps[number - 1].summed
        if not summed:
            return states[-1]
        return self.sums[str(number)](*(hidden if state == INPUT else states[state] for state in summed))


def layer_schedule_config(steps: Sequence[LayerStep], norm: RMSNorm.Config) -> LayerSchedule.Config:
    """The torchtitan config of a schedule. Every tensor-parallel rank has all weights of the schedule.
    `norm`: the config of the norm of normed steps."""
    sharding = ShardingConfig(state_shardings={"weight": dense_param_placement(tp=spmd.R)})
    sums = {
        number: WeightedSum.Config(
            states=len(step.summed), param_init={"weight": skip_param_init}, sharding_config=sharding
        )
        for number, step in enumerate(steps, 1)
        if step.summed
    }
    own_norm = norm if any(step.normed for step in steps) else None
    return LayerSchedule.Config(steps=steps, sums=sums, joined=Joined.Config(), norm=own_norm)
