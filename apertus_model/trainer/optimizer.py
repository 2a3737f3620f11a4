"""The optimizer of a run inside torchtitan: registry, parameter groups, and what of its state is stored.

Invariants:
- Hyperparameters are those of the spec, also after loading a checkpoint: they are never stored, so they cannot come back.
- State exists from the start, with step counters at zero. torchtitan makes missing state with a step on zero gradients, which
  would advance counters and warm-ups.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.components.optimizer.utils import get_flat_optim_state_dict, init_optim_state

from apertus_model.optimizers.ademamix import AdEMAMix
from specs.optimizer import OptimizerSpec

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"ademamix": AdEMAMix, "adamw": torch.optim.AdamW}
NOT_DECAYED = r"norm\.weight$|\.alpha_[pn]$"


class Optimizers(OptimizersContainer):
    """torchtitan's container of optimizers, with ours in the registry and the invariants above."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass

    def __init__(self, config: Config, *, model_parts: list[torch.nn.Module]) -> None:
        super().__init__(config, model_parts=model_parts)
        for optimizer in self.optimizers:
            init_optim_state(optimizer)
            for state in optimizer.state.values():
                state["step"].zero_()

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
        return OPTIMIZERS[name]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Tensors of the state, `state.<parameter>.<name>`, without hyperparameters."""
        return {name: value for name, value in super().state_dict().items() if name.startswith("state.")}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the tensors; the hyperparameters stay what they are."""
        own: dict[str, Any] = {}
        for optimizer in self.optimizers:
            own |= get_flat_optim_state_dict(optimizer)
        super().load_state_dict({**own, **state_dict})


def optimizer_config(spec: OptimizerSpec, *, adapters_only: bool = False) -> Optimizers.Config:
    """torchtitan config of a resolved optimizer spec: two groups, of which norms and xIELU scalars are not decayed. With `adapters_only`
    only matrices are trained, which is one group."""
    assert spec.name is not None and spec.betas is not None, "the planner resolves the optimizer"
    settings: dict[str, Any] = {"lr": spec.lr, "eps": spec.eps, "betas": spec.betas}
    if spec.name == "ademamix":
        settings |= {
            "alpha": spec.alpha,
            "alpha_warmup": spec.alpha_warmup,
            "beta3_warmup": spec.beta3_warmup,
        }
    else:
        settings["betas"] = spec.betas[:2]
    decays = {".*": spec.weight_decay} if adapters_only else {NOT_DECAYED: 0.0, ".*": spec.weight_decay}
    return Optimizers.Config(
        implementation="foreach",
        param_groups=[
            ParamGroupConfig(pattern=pattern, optimizer_name=spec.name, optimizer_kwargs={**settings, "weight_decay": decay})
            for pattern, decay in decays.items()
        ],
    )
