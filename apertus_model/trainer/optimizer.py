"""The optimizer of a run inside torchtitan: registry, parameter groups, and what of its state is stored.

Invariants:
- Hyperparameters are those of the spec, also after loading a checkpoint: they are never stored, so they cannot come back.
- The state is tensors, `state.<parameter>.<name>`; numbers that an optimizer keeps for all parameters stand under each of them.
- State exists from the start, all zeros, with counters as before the first step. torchtitan makes missing state with a step on zero
  gradients, which would advance counters and warm-ups.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.components.optimizer.utils import init_optim_state

from apertus_model.optimizers import library
from apertus_model.optimizers.ademamix import AdEMAMix
from apertus_model.optimizers.muon import Muon
from apertus_model.optimizers.sophia import Sophia
from specs.optimizer import OptimizerSpec

logger = logging.getLogger(__name__)

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "ademamix": AdEMAMix,
    "adamw": torch.optim.AdamW,
    "adopt": library.adopt,
    "lion": library.lion,
    "signum": library.signum,
    "muon": Muon,
    "soap": library.soap,
    "prodigy": library.prodigy,
    "schedule-free-adamw": library.schedule_free_adamw,
    "mars": library.mars,
    "sophia": Sophia,
}
NOT_DECAYED = r"norm\.weight$|\.alpha_[pn]$"
NOT_HIDDEN = r"^(tok_embeddings|lm_head)\."  # matrices that are tables of tokens
_LOOPS = ("adopt", "mars")  # DTensor lacks operators of their foreach path


class Optimizers(OptimizersContainer):
    """torchtitan's container of optimizers, with ours in the registry and the invariants above."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass

    def __init__(self, config: Config, *, model_parts: list[torch.nn.Module]) -> None:
        super().__init__(config, model_parts=model_parts)
        self._aside: dict[torch.Tensor, torch.Tensor] = {}
        for optimizer in self.optimizers:
            init_optim_state(optimizer)
            for tensor in _tensors(optimizer).values():
                tensor.zero_()
            if isinstance(optimizer, library.WithCounters):
                optimizer.set_counters(optimizer.COUNTERS)

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
        return OPTIMIZERS[name]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Tensors of the state, those in use where they are tensors there too."""
        state: dict[str, torch.Tensor] = {}
        for optimizer in self.optimizers:
            state |= _tensors(optimizer)
            for name, parameter in _named(optimizer):
                if isinstance(optimizer, library.WithCounters):
                    for counter, value in optimizer.counters().items():
                        state[f"state.{name}.{counter}"] = torch.tensor(value, dtype=torch.float64)
                if isinstance(optimizer, library.Averaging):
                    state[f"state.{name}.y"] = self._aside.get(parameter, parameter).detach().clone()
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the tensors; the hyperparameters stay what they are. A schedule-free optimizer sets the weights of the model to those
        that it trains.

        Raises:
            KeyError: a tensor is missing.
        """
        for optimizer in self.optimizers:
            for name, tensor in _tensors(optimizer).items():
                tensor.copy_(state_dict[name])
            for name, parameter in _named(optimizer):
                if isinstance(optimizer, library.WithCounters):
                    optimizer.set_counters({counter: state_dict[f"state.{name}.{counter}"].item() for counter in optimizer.COUNTERS})
                if isinstance(optimizer, library.Averaging):
                    parameter.copy_(state_dict[f"state.{name}.y"])

    def hessian_due(self) -> bool:
        """Whether the next step wants a new estimate of the Hessian (Sophia): the same on all ranks."""
        return any(isinstance(optimizer, Sophia) and optimizer.due for optimizer in self.optimizers)

    def update_hessian(self) -> None:
        """Takes the gradients, which `trainer.gauss_newton` has made, into the estimate of the Hessian."""
        for optimizer in self.optimizers:
            if isinstance(optimizer, Sophia):
                optimizer.update_hessian()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The model has the weights that are the result of training: for a schedule-free optimizer the averaged ones, for the others those
        it has anyway. Afterwards it has the same bits as before."""
        averaging = [optimizer for optimizer in self.optimizers if isinstance(optimizer, library.Averaging)]
        for optimizer in averaging:
            self._aside |= optimizer.to_average()
        try:
            yield
        finally:
            for optimizer in averaging:
                optimizer.from_average(self._aside)
            self._aside = {}


def _named(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for group in optimizer.param_groups:
        yield from zip(group["param_names"], group["params"], strict=True)


def _tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The tensors in use, also those in lists, which are counted: `state.<parameter>.<name>.<index>`."""
    found: dict[str, torch.Tensor] = {}
    for parameter_name, parameter in _named(optimizer):
        for name, value in optimizer.state[parameter].items():
            for part, tensor in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if isinstance(tensor, torch.Tensor):
                    found[f"state.{parameter_name}.{name}" + (f".{part}" if part is not None else "")] = tensor
    return found


def optimizer_config(spec: OptimizerSpec, *, adapters_only: bool = False) -> Optimizers.Config:
    """torchtitan config of a resolved optimizer spec: groups of what is decayed, what is not (norms and xIELU scalars), and what another
    optimizer updates. With `adapters_only` only matrices are trained, which is one group."""
    assert spec.name is not None, "the planner resolves the optimizer"
    groups = [_group(r".*", spec)]
    if not adapters_only:
        if spec.name in ("muon", "d-muon"):
            groups = [_adamw_half(NOT_DECAYED, spec, 0.0), _adamw_half(NOT_HIDDEN, spec, spec.weight_decay), *groups]
        else:
            groups = [_group(NOT_DECAYED, spec.model_copy(update={"weight_decay": 0.0})), *groups]
    return Optimizers.Config(implementation="foreach", param_groups=groups)


def _group(pattern: str, spec: OptimizerSpec) -> ParamGroupConfig:
    """Parameters with the optimizer of the spec."""
    assert spec.name is not None
    given: dict[str, Any] = {name: getattr(spec, name) for name in ("lr", "betas", "momentum", "eps", "weight_decay")}
    settings = {name: value for name, value in given.items() if value is not None}
    if spec.name == "ademamix":
        settings |= {name: getattr(spec, name) for name in ("alpha", "alpha_warmup", "beta3_warmup")}
        settings |= {"state_dtype": getattr(torch, spec.state_dtype or "float32"), "fused": None}  # it finds out by itself
    elif spec.name in ("muon", "d-muon"):
        del settings["betas"], settings["eps"]  # the AdamW half's
        settings["adjust_lr_fn"] = "original" if spec.name == "muon" else "match_rms_adamw"
        return ParamGroupConfig(pattern=pattern, optimizer_name="muon", optimizer_kwargs=settings)
    elif spec.name == "adopt":
        settings["weight_decouple"] = True
    elif spec.name == "soap":
        settings["precondition_frequency"] = spec.precondition_frequency
    elif spec.name == "prodigy":
        settings["d_coef"] = spec.d_coef
    elif spec.name == "mars":
        settings |= {"gamma": spec.gamma, "weight_decay_1d": spec.weight_decay}
    elif spec.name == "sophia":
        settings |= {"rho": spec.rho, "hessian_interval": spec.hessian_interval}
    if spec.name in _LOOPS:
        settings["foreach"] = False
    return ParamGroupConfig(pattern=pattern, optimizer_name=spec.name, optimizer_kwargs=settings)


def _adamw_half(pattern: str, spec: OptimizerSpec, weight_decay: float | None) -> ParamGroupConfig:
    """Parameters that Muon leaves to AdamW, at a rate in a fixed ratio to the matrices' (`trainer.schedule` multiplies by `lr_ratio`)."""
    settings = {"lr": spec.lr, "lr_ratio": spec.adamw_lr_ratio, "betas": spec.betas, "eps": spec.eps, "weight_decay": weight_decay}
    return ParamGroupConfig(pattern=pattern, optimizer_name="adamw", optimizer_kwargs=settings)
