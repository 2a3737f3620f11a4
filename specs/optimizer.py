"""The optimizer of a training stage: its fields, what they inherit, and the runs that it refuses.

Invariants:
- A field that is left out is inherited from the parent stage's resolved optimizer if that has the same name,
  else it is the value in `specs.capabilities.OPTIMIZERS`. When the name changes, only `grad_clip` is
  inherited, and `lr` must be stated.
- A field that an optimizer does not read cannot be stated for it, resolves to None, and enters no
  fingerprint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from specs.anomalies import Anomalies
from specs.base import Spec, identity, option
from specs.capabilities import OBJECTIVES, OPTIMIZERS, OptimizerName
from specs.errors import FieldPath, Problem, SpecError
from specs.launch import Parallel
from specs.units import Budget


def refused_layout(name: OptimizerName, parallel: Parallel, processes: int) -> str | None:
    """Why an optimizer cannot train in a layout, and what to do; None when it can.

    dp_shard, tp, cp and pp all shard weights; with dp_replicate every group of processes has a copy."""
    facts, shards = OPTIMIZERS[name], processes // parallel.dp_replicate
    if facts.pipelines and parallel.pp > 1:
        return f"{facts.pipelines} (pp {parallel.pp})"
    if not facts.shards or shards <= 1:
        return None
    fix = f"launch.parallel {{dp_replicate: {processes}, dp_shard: 1}}, one process, or another optimizer"
    return f"{facts.shards}; this layout makes {shards} shards of every weight: use {fix}"


def refusals(
    name: OptimizerName, objective: str, anomalies: Anomalies, parallel: Parallel, processes: int
) -> Iterator[str]:
    """Why an optimizer cannot train in a layout, minimise an objective (`Segment.objective`), or follow a
    policy for anomalies, and what to do."""
    facts = OPTIMIZERS[name]
    if (layout := refused_layout(name, parallel, processes)) is not None:
        yield layout
    if facts.objectives and not OBJECTIVES[objective].extra_pass:
        yield (f"{facts.objectives}, and not {objective}: set optimizer.name and optimizer.lr of another one")
    if facts.skipped_steps and anomalies.skips:
        yield f"{facts.skipped_steps}; use anomalies: stop"


def _steps(value: Any) -> Any:
    if isinstance(value, str):
        budget = Budget.parse(value)
        if budget.unit != "steps":
            raise ValueError(
                f"'{value}' is in {budget.unit}; a warm-up of the optimizer is counted in steps, write"
                f" '{budget.amount} steps'"
            )
        return budget.amount
    return value


Steps = Annotated[int, BeforeValidator(_steps, json_schema_input_type=int | str)]
Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSpec(Spec):
    """The `name` of an optimizer and the fields that it reads; the table below has the fields of each
    optimizer and their defaults.

    `muon` and `d-muon` update the matrices of the layers; AdamW updates embeddings, output layer, norms and
    xIELU scalars, with `betas`, `eps` and `adamw_lr_ratio`. `mars` updates matrices; AdamW with betas (0.9,
    0.95) updates the rest. `schedule-free-adamw` stores and validates the averaged weights, and needs no
    decay of the learning rate; the weights that it trains are part of its state. `soap` and `prodigy` need
    unsharded weights: one process, or `dp_replicate`. `sophia` (Sophia-G) makes a second pass over the batch
    of every tenth step (`hessian_interval`), with labels that the model draws; it is refused for `qrpo`,
    `dpo` and `reward_model`."""

    name: OptimizerName | None = option(None)
    lr: float | None = option(
        None,
        gt=0,
        le=1000,
        description="peak learning rate; by default, in a later stage with the same optimizer, the parent's"
        " rate at the branch point",
    )
    betas: tuple[Beta, Beta, Beta] | tuple[Beta, Beta] | None = option(
        None, description="three for ademamix, else two"
    )
    momentum: Beta | None = option(None)
    alpha: float | None = option(None, ge=0, description="final weight of the slow average")
    alpha_warmup: Steps | None = option(None, ge=0, description="optimizer steps until alpha is reached")
    beta3_warmup: Steps | None = option(None, ge=0, description="optimizer steps until b3 is reached")
    state_dtype: Literal["float32", "bfloat16"] | None = identity(
        None,
        neutral="float32",
        description="dtype of the moments; bfloat16 ones are computed in float32 and rounded stochastically."
        " Only ademamix has bfloat16",
    )
    eps: float | None = option(None, gt=0)
    weight_decay: float | None = option(None, ge=0, description="not applied to norms and xIELU scalars")
    adamw_lr_ratio: float | None = option(
        None,
        gt=0,
        description="learning rate of parameters that AdamW updates, as a fraction of the matrices'",
    )
    precondition_frequency: int | None = option(None, ge=1, description="steps between two eigenbases")
    d_coef: float | None = option(None, gt=0, description="factor on the estimated distance")
    gamma: float | None = option(None, ge=0, description="strength of the variance reduction")
    rho: float | None = option(
        None, gt=0, description="scale of the estimated Hessian: the larger, the less is clipped"
    )
    hessian_interval: int | None = option(
        None, ge=1, description="steps from one estimate of the Hessian to the next"
    )
    grad_clip: float | None = option(None, gt=0, description="maximum of the global gradient norm")

    def resolved(self, inherited: Mapping[str, Any], at: FieldPath = ("optimizer",)) -> OptimizerSpec:
        """The spec with a value for every field that the optimizer reads: the stated one, else that of
        `inherited`, else that of `specs.capabilities.OPTIMIZERS`. Other fields are None.

        `inherited`: those of the parent's resolved optimizer; empty without a parent. Raises SpecError, with
        paths under `at`, if the optimizer does not read a stated field or has another number of betas, or if
        `lr` is missing where the optimizer changes."""
        own = self.stated()
        before = inherited.get("name")
        name: OptimizerName = self.name or before or "ademamix"
        facts = OPTIMIZERS[name]
        problems = []
        for field, value in own.items():
            if field not in ("name", *facts.fields) and (field, value) != ("state_dtype", "float32"):
                message = f"{name} does not read {field}; it reads {', '.join(facts.fields)}"
                readers = ", ".join(other for other, its in OPTIMIZERS.items() if field in its.fields)
                fix = f"leave it out, or use an optimizer that reads it: {readers}."
                problems.append(Problem((*at, field), message, fix))
        betas = list(facts.defaults.get("betas", ()))
        if self.betas is not None and betas and len(self.betas) != len(betas):
            message = f"{name} has {len(betas)} betas, not {len(self.betas)}"
            problems.append(Problem((*at, "betas"), message, f"write for example {betas}."))
        if before not in (None, name) and self.lr is None:
            message = f"the learning rate of the parent's optimizer {before} does not apply to {name}"
            problems.append(Problem((*at, "lr"), message, "set optimizer.lr."))
        if problems:
            raise SpecError(problems)
        kept = {field: inherited.get(field) for field in (facts.fields if before == name else ["grad_clip"])}
        goes_over = {field: value for field, value in kept.items() if value is not None}
        values = {"state_dtype": "float32", **facts.defaults, **goes_over, **own, "name": name}
        return OptimizerSpec(**values)
