"""The optimizer of a training stage.

Invariant: a field that is `None` is inherited: from the parent stage's resolved optimizer, or from `DEFAULTS` where there is no parent.
`lr` has no default. Values: Apertus report table of hyper-parameters and the released run scripts (AdEMAMix, arXiv 2409.03137).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from specs.base import Spec, identity
from specs.units import Budget

DEFAULTS: dict[str, Any] = {
    "name": "ademamix",
    "betas": (0.9, 0.999, 0.9999),
    "alpha": 8.0,
    "alpha_warmup": 100_000,
    "beta3_warmup": 100_000,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "grad_clip": 0.1,
}


def _steps(value: Any) -> Any:
    if isinstance(value, str):
        budget = Budget.parse(value)
        if budget.unit != "steps":
            raise ValueError(
                f"'{value}' is in {budget.unit}; a warm-up of the optimizer is counted in steps, write '{budget.amount} steps'"
            )
        return budget.amount
    return value


Steps = Annotated[int, BeforeValidator(_steps, json_schema_input_type=int | str)]


class OptimizerSpec(Spec):
    """AdEMAMix or AdamW. `betas` are (b1, b2, b3); AdamW reads the first two and ignores alpha and the warm-ups."""

    name: Literal["ademamix", "adamw"] | None = identity(None)
    lr: float | None = identity(
        None, gt=0, description="peak learning rate; left out in a later stage: the parent's rate at the branch point"
    )
    betas: tuple[float, float, float] | None = identity(None)
    alpha: float | None = identity(None, ge=0)
    alpha_warmup: Steps | None = identity(None, ge=0, description="optimizer steps until alpha is reached")
    beta3_warmup: Steps | None = identity(None, ge=0, description="optimizer steps until b3 is reached")
    eps: float | None = identity(None, gt=0)
    weight_decay: float | None = identity(None, ge=0, description="not applied to norms and xIELU scalars")
    grad_clip: float | None = identity(None, gt=0, description="limit of the global gradient norm")

    def resolved(self, inherited: dict[str, Any]) -> OptimizerSpec:
        """Every field set: what is stated here, else `inherited`, else `DEFAULTS`."""
        stated = {name: value for name in type(self).model_fields if (value := getattr(self, name)) is not None}
        return OptimizerSpec(**{**DEFAULTS, **inherited, **stated})
