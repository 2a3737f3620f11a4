"""Low-rank adaptation (arXiv 2106.09685): W x + s B A x, s = alpha / rank; only A and B are trained.

A model with adapters has, besides each adapted `X.weight`, the tensors `X.lora_a.weight` (rank, in),
`X.lora_b.weight` (out, rank) and `X.lora_scale` (s, a float32 scalar). A checkpoint stores all of them. When
it is read into a model without adapters, `apertus_model.trainer.checkpoint.load_tensors` calls
`merge_adapter`, which gives W + s B A.

Invariants:
- A new adapter changes nothing: B is zero. A is a function of (seed, name, element), like all initial
  weights.
- A merged weight has the same bits on every layout: each element is computed by itself in float64 and rounded
  once.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import spmd_types as spmd
import torch
from torch import nn
from torchtitan.components.lora import _get_lora_cls
from torchtitan.models.common import Linear
from torchtitan.models.common.decoder_sharding import dense_param_placement

from apertus_model.model.init import local_part, owned_region
from apertus_model.model.output import REWARD_HEAD
from specs.settings import Lora

ADAPTER_PARTS = ("lora_a.weight", "lora_b.weight", "lora_scale")
_PARENTS = {
    "wq": "attention.qkv_linear",
    "wk": "attention.qkv_linear",
    "wv": "attention.qkv_linear",
    "wo": "attention",
} | dict.fromkeys(("up_proj", "down_proj"), "feed_forward")

_TitanLora: Any = _get_lora_cls(Linear)


class LoraLinear(_TitanLora):
    """torchtitan's linear layer with an adapter, whose scale is stored too. The base weight has the same name
    as without an adapter."""

    @dataclass(kw_only=True, slots=True)
    class Config(_TitanLora.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        for adapter in (self.lora_a, self.lora_b):
            adapter._param_init = config.param_init  # `initialise_parameters` fills them
        self.register_buffer("lora_scale", torch.tensor(self._lora_scaling))

    def _init_self_buffers(self, *, buffer_device: torch.device | None = None) -> None:
        self.lora_scale.fill_(self._lora_scaling)


def add_adapters(model: nn.Module, lora: Lora) -> None:
    """Adds an adapter to the layers that `lora.targets` names, in place, and freezes all other parameters
    but the head of a reward model, which is new."""
    for block in model.layers.values():
        for target in lora.targets:
            parent = block.get_submodule(_PARENTS[target])
            setattr(parent, target, _adapted(getattr(parent, target), lora))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name) or name == REWARD_HEAD)


def _adapted(linear: Any, lora: Lora) -> LoraLinear:
    sharding = linear._sharding_config
    if sharding is not None:
        states = {**sharding.state_shardings, "lora_scale": dense_param_placement(tp=spmd.R)}
        sharding = dataclasses.replace(sharding, state_shardings=states)
    return LoraLinear.Config(
        in_features=linear.in_features,
        out_features=linear.out_features,
        param_init=linear._param_init,
        sharding_config=sharding,
        rank=lora.rank,
        alpha=lora.alpha,
    ).build()


def is_adapter(name: str) -> bool:
    """Whether a tensor of a checkpoint is part of an adapter."""
    return name.endswith(ADAPTER_PARTS)


@torch.no_grad()
def merge_adapter(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor) -> None:
    """weight <- weight + scale * b a, in place, rounded once. `weight`: (out, in), tensor or DTensor on any
    layout; `a`: (rank, in) and `b`: (out, rank), whole."""
    local = local_part(weight)
    (row, column), (rows, columns) = owned_region(weight)
    own_a, own_b = a[:, column : column + columns].double(), b[row : row + rows].double()
    product = torch.zeros(local.shape, dtype=torch.float64, device=local.device)
    # not a matrix product, whose order of summation depends on the shape of the part
    for k in range(a.shape[0]):
        product += own_b[:, k, None] * own_a[None, k]
    local.copy_(local.double() + product * scale.double())
