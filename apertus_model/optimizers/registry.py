"""The optimizers by name: how each is made, which parameters it updates, with which settings."""

from collections.abc import Callable
from functools import partial

import torch
from torchtitan.components.optimizer import ParamGroupConfig

from apertus_model.device import has_gpu
from apertus_model.optimizers.ademamix import AdEMAMix
from apertus_model.optimizers.benchmark import library
from apertus_model.optimizers.benchmark.sophia import Sophia
from apertus_model.optimizers.muon import Muon
from specs.capabilities import OPTIMIZERS, OptimizerName
from specs.optimizer import OptimizerSpec

CONSTRUCTORS: dict[OptimizerName, Callable[..., torch.optim.Optimizer]] = {
    "ademamix": AdEMAMix,
    "adamw": torch.optim.AdamW,
    "adopt": library.adopt,
    "lion": library.lion,
    "signum": library.signum,
    "muon": partial(Muon, adjust_lr_fn="original"),
    "d-muon": partial(Muon, adjust_lr_fn="match_rms_adamw"),
    "soap": library.soap,
    "prodigy": library.prodigy,
    "schedule-free-adamw": library.schedule_free_adamw,
    "mars": library.mars,
    "sophia": Sophia,
}
NOT_DECAYED = r"norm\.weight$|\.alpha_[pn]$|\.(conv_[cbx]|a_log|dt_bias|d|out_norm)$"  # the last: of Mamba-2
SCHEDULE = r"^schedule\."  # weights of the sums of a layer schedule
NOT_HIDDEN = r"^(tok_embeddings|lm_head)\."  # matrices that are tables of tokens
OF_TRAINER = ("grad_clip", "adamw_lr_ratio")  # fields that no optimizer is given
OF_ADAMW = ("betas", "eps")  # fields of the AdamW beside an optimizer of matrices


def parameter_groups(spec: OptimizerSpec) -> list[ParamGroupConfig]:
    """The parameter groups of a resolved optimizer spec, some of which may be empty in a model: parameters
    without weight decay (the weights of a layer schedule in a group of their own, norms and xIELU scalars),
    those that another optimizer updates, and all others."""
    assert spec.name is not None, "the planner resolves the optimizer"
    not_decayed = (SCHEDULE, NOT_DECAYED)
    rest = _group(r".*", spec)
    if OPTIMIZERS[spec.name].matrices_only:
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
    facts = OPTIMIZERS[spec.name]
    elsewhere = {*OF_TRAINER, *(OF_ADAMW if facts.matrices_only else ())}
    settings = {name: getattr(spec, name) for name in facts.fields if name not in elsewhere}
    if "state_dtype" in settings:
        settings["state_dtype"] = getattr(torch, settings["state_dtype"])
    if facts.kernel:
        settings |= _implementation()
    return ParamGroupConfig(pattern=pattern, optimizer_name=spec.name, optimizer_kwargs=settings)


def _adamw_half(pattern: str, spec: OptimizerSpec, weight_decay: float | None) -> ParamGroupConfig:
    """The group of parameters that Muon leaves to AdamW, at a rate in a fixed ratio to that of the matrices
    (`trainer.optimizer.LearningRate` multiplies by `lr_ratio`)."""
    settings = {
        "lr": spec.lr,
        "lr_ratio": spec.adamw_lr_ratio,
        "betas": spec.betas,
        "eps": spec.eps,
        "weight_decay": weight_decay,
        **_implementation(),
    }
    return ParamGroupConfig(pattern=pattern, optimizer_name="adamw", optimizer_kwargs=settings)


def _implementation() -> dict[str, bool]:
    """Which update an optimizer with a kernel makes: that kernel on a GPU, operators on the CPU."""
    return {"fused": has_gpu(), "foreach": not has_gpu()}
