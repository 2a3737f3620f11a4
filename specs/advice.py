"""The codes of advice that a plan can give, each with its reason and source. A recipe can silence a code.

Invariant: a code never changes its meaning. `flows/planning/advice` decides when a code applies, and with
which numbers.
"""

from typing import Annotated, NamedTuple

from pydantic import AfterValidator

from specs.errors import did_you_mean


class Code(NamedTuple):
    when: str  # the condition under which the advice is given
    reason: str  # why it matters
    source: str  # paper or document that supports the reason


CODES: dict[str, Code] = {
    "sft-optimizer": Code(
        "a stage of SFT, QRPO or DPO has another optimizer than the pretraining that it descends from",
        "In SFT, full fine-tuning with the optimizer of pretraining forgets least at the same gain on the new"
        " task. QRPO and DPO were not tested.",
        "arXiv 2605.06654",
    ),
    "decay-before-sft": Code(
        "the learning rate was decayed in an ancestor of a stage of SFT",
        "Models whose rate was only warmed up and held constant were better after SFT, although their loss"
        " before it was higher: decay ends in sharper minima.",
        "arXiv 2603.16127",
    ),
    "learning-rate-jump": Code(
        "a stage of pretraining begins with more than 1.5 times the rate that its parent ended with, and does"
        " not warm up to it; or with less than 1/1.5 of it",
        "Going up at once raises the loss, which costs tokens to come down again; going down at once ends the"
        " stable phase without decay.",
        "arXiv 2403.08763",
    ),
    "slow-warmup": Code(
        "AdEMAMix reaches its alpha or b3 only after the last step for which its states are kept",
        "The slow average never gets the stated weight: training is closer to AdamW. The published warm-ups "
        "are for runs of 100,000 steps and more.",
        "arXiv 2409.03137",
    ),
    "never-reached": Code(
        "a stage ends before a step of its checkpoint.milestones or, if it continues its parent's schedule,"
        " before its warm-up does",
        "The checkpoint is never made, or the learning rate never reaches its peak, without any other"
        " message.",
        "the recipe",
    ),
    "repetition": Code(
        "a stage ends with more than 4 passes over a source, counted from new weights",
        "For up to about four passes, repeated tokens are worth nearly as much as new ones; after that, much"
        " less.",
        "arXiv 2305.16264",
    ),
    "goldfish-off": Code(
        "a stage sees a source more than once and trains on all of its labels",
        "Repeated text is memorised verbatim; leaving out a fixed part of the labels prevents that at little"
        " cost.",
        "arXiv 2406.10209",
    ),
    "rope-theta": Code(
        "the base of the rotary embedding is below the bound for the sequence length, or the context grows"
        " and the base does not",
        "Below the bound a query cannot prefer similar tokens over random ones at that distance: long"
        " contexts look trained by their loss and are not used.",
        "arXiv 2405.14591",
    ),
    "tokens-per-batch": Code(
        "a stage changes the length of its sequences and inherits the number of them per step",
        "Tokens per step change with the length, and so does the noise of the gradient that the learning rate"
        " was chosen for.",
        "arXiv 1812.06162",
    ),
    "not-deterministic": Code(
        "a stage is trained with deterministic: false",
        "Kernels whose sums depend on timing give other bits each time: a resumed run then differs from an"
        " uninterrupted one, and a defect cannot be found by repeating a step.",
        "the recipe",
    ),
    "checkpoint-interval": Code(
        "the time between checkpoints is less than a third, or more than three times, of the optimum, and"
        " training takes 1% longer for it",
        "Rare checkpoints lose more work at a failure; frequent ones stop training more often.",
        "Young 1974; Daly 2006 (doi 10.1016/j.future.2004.11.016)",
    ),
    "gpu-memory": Code(
        "a stage does not fit into the memory of the cluster's GPU",
        "It would end with an out-of-memory error at its first step. The nearest setting that fits is named.",
        "docs/estimates.md",
    ),
    "slow-inference": Code(
        "a stage samples or scores for over an hour, and for longer than all training",
        "Later stages wait for it.",
        "docs/estimates.md",
    ),
    "slow-corpus": Code(
        "a corpus would take its workers over a week",
        "Training waits for it, and the units of a corpus can be shared by many more workers.",
        "docs/estimates.md",
    ),
    "cluster-size": Code(
        "a stage has more processes than the cluster has GPUs, or shares a model for sampling among more than"
        " a node has",
        "It would wait for nodes that do not exist.",
        "the recipe",
    ),
}


def _known(code: str) -> str:
    if code not in CODES:
        raise ValueError(f"there is no code of advice '{code}'; {did_you_mean(code, CODES)}")
    return code


Silenced = list[Annotated[str, AfterValidator(_known)]]
