"""The optimizers of a training stage, the fields that each reads, and its published defaults.

Invariants:
- A field that is left out is inherited from the parent stage's resolved optimizer if that has the same name,
  else it is the value in `PUBLISHED`. When the name changes, only `grad_clip` is inherited, and `lr` must be
  stated.
- A field that an optimizer does not read cannot be stated for it, resolves to None, and enters no
  fingerprint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from specs.anomalies import Anomalies
from specs.base import Spec, identity
from specs.errors import FieldPath, Problem, SpecError
from specs.launch import Parallel
from specs.units import Budget

Name = Literal[
    "ademamix", "adamw", "adopt", "lion", "signum", "muon", "d-muon", "soap", "prodigy",
    "schedule-free-adamw", "mars", "sophia"
]  # fmt: skip


@dataclass(frozen=True)
class Published:
    """The published values of an optimizer, with their source."""

    source: str  # paper and code of the values
    defaults: Mapping[str, Any]  # of every field that the optimizer reads, except `lr`, which has no default

    @property
    def fields(self) -> list[str]:
        return ["lr", *self.defaults]


def _published(source: str, *, grad_clip: float = 1.0, **defaults: Any) -> Published:
    """The published defaults with `grad_clip`, which belongs to the trainer: a value is published only for
    AdEMAMix as Apertus uses it; for the others 1.0 is usual."""
    return Published(source, {**defaults, "grad_clip": grad_clip})


PUBLISHED: dict[str, Published] = {
    "ademamix": _published(
        "arXiv 2409.03137; values of the Apertus report, arXiv 2509.14233",
        betas=(0.9, 0.999, 0.9999), alpha=8.0, alpha_warmup=100_000, beta3_warmup=100_000, eps=1e-8,
        weight_decay=0.1,
        state_dtype="float32", grad_clip=0.1,
    ),
    "adamw": _published("arXiv 1711.05101, torch.optim.AdamW", betas=(0.9, 0.999), eps=1e-8,
    weight_decay=0.01),
    "adopt": _published("arXiv 2411.02853, iShohei220/adopt", betas=(0.9, 0.9999), eps=1e-6,
    weight_decay=0.0),
    "lion": _published("arXiv 2302.06675, google/automl", betas=(0.9, 0.99), weight_decay=0.0),
    "signum": _published("arXiv 1802.04434", momentum=0.9, weight_decay=0.0),
    "muon": _published(
        "kellerjordan.github.io/posts/muon, KellerJordan/Muon: 0.02 for matrices and 3e-4 for the rest",
        momentum=0.95, weight_decay=0.0, betas=(0.9, 0.95), eps=1e-10, adamw_lr_ratio=0.015,
    ),
    "d-muon": _published(
        "arXiv 2502.16982, MoonshotAI/Moonlight", momentum=0.95, weight_decay=0.1, betas=(0.9, 0.95),
        eps=1e-8, adamw_lr_ratio=1.0
    ),
    "soap": _published(
        "arXiv 2409.11321, nikhilvyas/SOAP", betas=(0.95, 0.95), eps=1e-8, weight_decay=0.01,
        precondition_frequency=10
    ),
    "prodigy": _published("arXiv 2306.06101, konstmish/prodigy: lr 1", betas=(0.9, 0.999), eps=1e-8,
    weight_decay=0.0, d_coef=1.0),
    "schedule-free-adamw": _published(
        "arXiv 2405.15682, facebookresearch/schedule_free", betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0
    ),
    "mars": _published("arXiv 2411.10438, AGI-Arena/MARS (MARS-AdamW)", betas=(0.95, 0.99), gamma=0.025,
    eps=1e-8, weight_decay=0.0),
    "sophia": _published(
        "arXiv 2305.14342, Liuhong99/Sophia (Sophia-G)",
        betas=(0.965, 0.99), rho=0.04, hessian_interval=10, eps=1e-15, weight_decay=0.1,
    ),
}  # fmt: skip

_WHOLE = {
    "soap": (
        "soap needs the eigenvectors of whole matrices, and pytorch_optimizer 4.1.0 cannot compute them "
        "from shards (it mixes sharded and whole tensors, and fails)"
    ),
    "prodigy": (
        "prodigy scales all its steps by one estimate over all parameters, and pytorch_optimizer "
        "4.1.0 cannot sum it over shards (it fails on them, and would otherwise count only those of its own "
        "process)"
    ),
}


def refused_layout(name: str, parallel: Parallel, processes: int) -> str | None:
    """Why an optimizer cannot train in a layout, and what to do; None when it can.

    dp_shard, tp, cp and pp all shard weights; with dp_replicate every group of processes has a copy."""
    if name == "sophia" and parallel.pp > 1:
        return (
            "sophia makes a second pass over a batch, with labels that the model draws; a pipeline cannot"
            f" do that (pp {parallel.pp})"
        )
    shards = processes // parallel.dp_replicate
    if name not in _WHOLE or shards <= 1:
        return None
    fix = f"launch.parallel {{dp_replicate: {processes}, dp_shard: 1}}, one process, or another optimizer"
    return f"{_WHOLE[name]}; this layout makes {shards} shards of every weight: use {fix}"


def refused_objective(name: str, objective: str) -> str | None:
    """Why an optimizer cannot minimise an objective (`Segment.objective`), and what to do; None when it
    can."""
    if name != "sophia" or objective in ("cross-entropy", "weighted-cross-entropy"):
        return None
    return (
        "sophia estimates the Hessian from labels that the model draws (Gauss-Newton-Bartlett), which needs "
        f"cross-entropy over the tokens of a step, and not {objective}: set optimizer.name and optimizer.lr"
        " of another one"
    )


def refused_anomalies(name: str, anomalies: Anomalies) -> str | None:
    """Why an optimizer cannot follow a policy for anomalies, and what to do; None when it can."""
    if name != "sophia" or not anomalies.skips:
        return None
    return (
        "sophia takes a batch into its Hessian before its loss is known, so no step can be skipped; use"
        " anomalies: stop"
    )


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

    name: Name | None = identity(None, neutral=None)
    lr: float | None = identity(
        None,
        neutral=None,
        gt=0,
        le=1000,
        description=(
            "peak learning rate; by default, in a later stage with the same optimizer, the parent's rate at"
            " the branch point"
        ),
    )
    betas: tuple[Beta, Beta, Beta] | tuple[Beta, Beta] | None = identity(
        None, neutral=None, description="three for ademamix, else two"
    )
    momentum: Beta | None = identity(None, neutral=None)
    alpha: float | None = identity(None, neutral=None, ge=0, description="final weight of the slow average")
    alpha_warmup: Steps | None = identity(
        None, neutral=None, ge=0, description="optimizer steps until alpha is reached"
    )
    beta3_warmup: Steps | None = identity(
        None, neutral=None, ge=0, description="optimizer steps until b3 is reached"
    )
    state_dtype: Literal["float32", "bfloat16"] | None = identity(
        None,
        neutral="float32",
        description=(
            "dtype of the moments; bfloat16 ones are computed in float32 and rounded stochastically. Only"
            " ademamix has bfloat16"
        ),
    )
    eps: float | None = identity(None, neutral=None, gt=0)
    weight_decay: float | None = identity(
        None, neutral=None, ge=0, description="not applied to norms and xIELU scalars"
    )
    adamw_lr_ratio: float | None = identity(
        None,
        neutral=None,
        gt=0,
        description="learning rate of parameters that AdamW updates, as a fraction of the matrices'",
    )
    precondition_frequency: int | None = identity(
        None, neutral=None, ge=1, description="steps between two eigenbases"
    )
    d_coef: float | None = identity(None, neutral=None, gt=0, description="factor on the estimated distance")
    gamma: float | None = identity(None, neutral=None, ge=0, description="strength of the variance reduction")
    rho: float | None = identity(
        None,
        neutral=None,
        gt=0,
        description="scale of the estimated Hessian: the larger, the less is clipped",
    )
    hessian_interval: int | None = identity(
        None, neutral=None, ge=1, description="steps from one estimate of the Hessian to the next"
    )
    grad_clip: float | None = identity(
        None, neutral=None, gt=0, description="maximum of the global gradient norm"
    )

    def resolved(self, inherited: Mapping[str, Any], at: FieldPath = ("optimizer",)) -> OptimizerSpec:
        """The spec with a value for every field that the optimizer reads: the stated one, else that of
        `inherited`, else that of `PUBLISHED`. Other fields are None.

        Args:
            inherited: fields of the parent's resolved optimizer; empty without a parent.
            at: path of this spec, for errors.

        Raises:
            SpecError: the optimizer does not read a stated field or has another number of betas, or `lr` is
                missing where the optimizer changes.
        """
        stated = self.stated()
        before = inherited.get("name")
        name = stated.get("name") or before or "ademamix"
        published = PUBLISHED[name]
        problems = [
            Problem(
                (*at, field),
                f"{name} does not read {field}; it reads {', '.join(published.fields)}",
                _fix(field),
            )
            for field, value in stated.items()
            if field not in ("name", *published.fields) and (field, value) != ("state_dtype", "float32")
        ]
        if (
            self.betas is not None
            and "betas" in published.defaults
            and len(self.betas) != len(published.defaults["betas"])
        ):
            wanted = f"{name} has {len(published.defaults['betas'])} betas, not {len(self.betas)}"
            problems.append(
                Problem((*at, "betas"), wanted, f"write for example {list(published.defaults['betas'])}.")
            )
        if before not in (None, name) and self.lr is None:
            message = f"the learning rate of the parent's optimizer {before} does not apply to {name}"
            problems.append(Problem((*at, "lr"), message, "set optimizer.lr."))
        if problems:
            raise SpecError(problems)
        kept = {
            field: inherited.get(field) for field in (published.fields if before == name else ["grad_clip"])
        }
        goes_over = {field: value for field, value in kept.items() if value is not None}
        return OptimizerSpec(
            **{"state_dtype": "float32", **published.defaults, **goes_over, **stated, "name": name}
        )


def _fix(field: str) -> str:
    readers = [name for name, published in PUBLISHED.items() if field in published.fields]
    return f"leave it out, or use an optimizer that reads it: {', '.join(readers)}."
