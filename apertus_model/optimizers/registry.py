"""The optimizers by name: how each is made, which parameters it updates, and with which settings of the
spec."""

from collections.abc import Callable
from typing import Any

import torch
from torchtitan.components.optimizer import ParamGroupConfig

from apertus_model.optimizers import library
from apertus_model.optimizers.ademamix import AdEMAMix
from apertus_model.optimizers.muon import Muon
from apertus_model.optimizers.sophia import Sophia
from specs.optimizer import OptimizerSpec

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
NOT_DECAYED = r"norm\.weight$|\.alpha_[pn]$|\.(conv_[cbx]|a_log|dt_bias|d|out_norm)$"  # the last: of Mamba-2
SCHEDULE = r"^schedule\."  # weights of the sums of a layer schedule
NOT_HIDDEN = r"^(tok_embeddings|lm_head)\."  # matrices that are tables of tokens
_LOOPS = ("adopt", "mars")  # DTensor lacks operators of their foreach path


def parameter_groups(spec: OptimizerSpec) -> list[ParamGroupConfig]:
    """The parameter groups of a resolved optimizer spec, some of which may be empty in a model: parameters
    without weight decay (the weights of a layer schedule in a group of their own, norms and xIELU scalars),
    those that another optimizer updates, and all others."""
    assert spec.name is not None, "the planner resolves the optimizer"
    not_decayed = (SCHEDULE, NOT_DECAYED)
    rest = _group(r".*", spec)
    if spec.name in ("muon", "d-muon"):
        return [
            *(_adamw_half(pattern, spec, 0.0) for pattern in not_decayed),
            _adamw_half(NOT_HIDDEN, spec, spec.weight_decay),
            rest,
        ]
    undecayed = spec.model_copy(update={"weight_decay": 0.0})
    return [*(_group(pattern, undecayed) for pattern in not_decayed), rest]


def _group(pattern: str, spec: OptimizerSpec) -> ParamGroupConfig:
    """The group of the parameters that match `pattern`, with the optimizer of the spec."""
    assert spec.name is not None
    given: dict[str, Any] = {
        name: getattr(spec, name) for name in ("lr", "betas", "momentum", "eps", "weight_decay")
    }
    settings = {name: value for name, value in given.items() if value is not None}
    if spec.name == "ademamix":
        settings |= {name: getattr(spec, name) for name in ("alpha", "alpha_warmup", "beta3_warmup")}
        # AdEMAMix finds out by itself whether it can be fused
        settings |= {"state_dtype": getattr(torch, spec.state_dtype or "float32"), "fused": None}
    elif spec.name in ("muon", "d-muon"):
        del settings["betas"], settings["eps"]  # these belong to the AdamW half
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
    """The group of parameters that Muon leaves to AdamW, at a rate in a fixed ratio to that of the matrices
    (`trainer.lr_scheduler` multiplies by `lr_ratio`)."""
    settings = {
        "lr": spec.lr,
        "lr_ratio": spec.adamw_lr_ratio,
        "betas": spec.betas,
        "eps": spec.eps,
        "weight_decay": weight_decay,
    }
    return ParamGroupConfig(pattern=pattern, optimizer_name="adamw", optimizer_kwargs=settings)
