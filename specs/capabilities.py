"""What is known about each objective and each optimizer, and the constants of the engine on which memory and
time depend. Checks, planner, estimates, rehearsal and engine read these tables; nothing here needs torch.

Invariant: the registries of the engine (`apertus_model.trainer.objectives` and
`apertus_model.optimizers.registry`) have exactly the names of these tables; tests compare them. The module of
a kind can add its own objective.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of an element."""
CHUNK_TOKENS = 1024
"""Labelled tokens whose logits exist at a time (`apertus_model.losses.cross_entropy`)."""
SPARSE_BLOCK = 128
"""Tokens of a block of sparse attention, and of FlexAttention's masks."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveFacts:
    """An objective of training, as `Segment.objective` names it."""

    # why a pipeline cannot have it; "" if its last process computes it from the rows of a micro-batch alone
    pipeline_obstacle: str = "its loss needs the whole sequences of a batch at once"
    extra_pass: bool = False  # an optimizer can ask for a pass with cross-entropy over the tokens of a step
    # rows of tokens; or of pairs of completions, which are scored: by all their tokens, or by the last one
    rows: Literal["tokens", "completions", "rewards"] = "tokens"
    label_weights: Literal["none", "one", "one per sum"] = "none"  # of each label
    # takes the log-probabilities of a row at a time, and computes the logits again in the backward pass
    recomputes_logits: bool = False
    # float32 tensors of (`CHUNK_TOKENS` x vocabulary) that exist at a time; 0: the logits alone
    chunk_logits: float = 0.0
    # float32 elements that the loss reads or writes, per logit, beside the softmax and its gradient
    logit_accesses: float = 0.0


_WEIGHTS = "the weights of its tokens ({}) do not reach the last process"
_DISTILLED: dict[str, Any] = {"chunk_logits": 4.0, "logit_accesses": 40.0}
OBJECTIVES: dict[str, ObjectiveFacts] = {
    "cross-entropy": ObjectiveFacts(pipeline_obstacle="", extra_pass=True),
    "weighted-cross-entropy": ObjectiveFacts(
        pipeline_obstacle=_WEIGHTS.format("weighted-cross-entropy"), extra_pass=True, label_weights="one"
    ),
    "normalised-cross-entropy": ObjectiveFacts(
        pipeline_obstacle=_WEIGHTS.format("normalised-cross-entropy"), label_weights="one per sum"
    ),
    "inverse-rl": ObjectiveFacts(
        pipeline_obstacle=_WEIGHTS.format("inverse-rl"), label_weights="one per sum", recomputes_logits=True
    ),
    "qrpo": ObjectiveFacts(rows="completions", recomputes_logits=True),
    "dpo": ObjectiveFacts(rows="completions", recomputes_logits=True),
    "bradley-terry": ObjectiveFacts(rows="rewards"),
    "distillation": ObjectiveFacts(pipeline_obstacle="", **_DISTILLED),
    "alignment": ObjectiveFacts(pipeline_obstacle="each process must have whole layers", **_DISTILLED),
    # beside the teacher's words, a byte tensor that marks them
    "stored-distillation": ObjectiveFacts(pipeline_obstacle="", chunk_logits=4.25, logit_accesses=25.0),
    "domain-weights": ObjectiveFacts(pipeline_obstacle="it needs a separate gradient for each source"),
}


@dataclass(frozen=True, kw_only=True)
class OptimizerFacts:
    """An optimizer, as `optimizer.name` names it."""

    source: str  # paper and code of the defaults
    defaults: Mapping[str, Any]  # of every field that it reads, except `lr`, which has no default
    # float32 tensors per parameter in its state: of matrices in layers, and of other parameters
    states: tuple[int, int]
    largest_side: int = 0  # longest side of a matrix that has two squares: an average, and its eigenvectors
    stores_trained: bool = False  # checkpoints hold averaged weights, and those in training beside them
    matrices_only: bool = False  # AdamW updates embeddings, output layer, norms and scalars
    kernel: bool = False  # the update of a GPU is one kernel, without temporaries
    # float32 elements that the operators of an update without that kernel read or write, per parameter (of a
    # matrix in layers, if `matrices_only`), with weight decay and after the first steps. Products of matrices
    # and what is done to `largest_side`'s squares are not among them.
    accesses: float = 0.0
    chunk: int | None = None  # elements that are updated at a time without that kernel; None: all
    shards: str = ""  # why it refuses shards of weights
    # It makes an extra pass over a batch. The reasons why it then refuses what cannot have one:
    pipelines: str = ""
    objectives: str = ""  # those without `ObjectiveFacts.extra_pass`
    skipped_steps: str = ""

    @property
    def fields(self) -> list[str]:
        """The fields of a recipe that it reads."""
        return ["lr", *self.defaults]


OptimizerName = Literal[
    "ademamix", "adamw", "adopt", "lion", "signum", "muon", "d-muon", "soap", "prodigy",
    "schedule-free-adamw", "mars", "sophia"
]  # fmt: skip


def _published(
    source: str, states: tuple[int, int], facts: Mapping[str, Any], *, grad_clip: float = 1.0, **defaults: Any
) -> OptimizerFacts:
    """The facts with published defaults. `grad_clip` belongs to the trainer: a value is published only for
    AdEMAMix as Apertus uses it; for the others 1.0 is usual."""
    return OptimizerFacts(
        source=source, states=states, defaults={**defaults, "grad_clip": grad_clip}, **facts
    )


OPTIMIZERS: dict[OptimizerName, OptimizerFacts] = {
    "ademamix": _published(
        "arXiv 2409.03137; values of the Apertus report, arXiv 2509.14233", (3, 3),
        {"kernel": True, "chunk": 1 << 27},  # two temporaries of 512 MiB in float32
        betas=(0.9, 0.999, 0.9999), alpha=8.0, alpha_warmup=100_000, beta3_warmup=100_000, eps=1e-8,
        weight_decay=0.1, state_dtype="float32", grad_clip=0.1,
    ),
    "adamw": _published(
        "arXiv 1711.05101, torch.optim.AdamW", (2, 2), {"kernel": True},
        betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01,
    ),
    "adopt": _published(
        "arXiv 2411.02853, iShohei220/adopt", (2, 2), {"accesses": 23.0},
        betas=(0.9, 0.9999), eps=1e-6, weight_decay=0.0,
    ),
    "lion": _published(
        "arXiv 2302.06675, google/automl", (1, 1), {"accesses": 13.0}, betas=(0.9, 0.99), weight_decay=0.0
    ),
    "signum": _published(
        "arXiv 1802.04434", (1, 1), {"accesses": 10.0}, momentum=0.9, weight_decay=0.0
    ),
    "muon": _published(
        "kellerjordan.github.io/posts/muon, KellerJordan/Muon: 0.02 for matrices and 3e-4 for the rest",
        (1, 2), {"matrices_only": True, "accesses": 13.5},
        momentum=0.95, weight_decay=0.0, betas=(0.9, 0.95), eps=1e-10, adamw_lr_ratio=0.015,
    ),
    "d-muon": _published(
        "arXiv 2502.16982, MoonshotAI/Moonlight", (1, 2),
        {"matrices_only": True, "accesses": 13.5},
        momentum=0.95, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8, adamw_lr_ratio=1.0,
    ),
    "soap": _published(
        "arXiv 2409.11321, nikhilvyas/SOAP", (2, 2),
        {
            "accesses": 20.0,
            "largest_side": 10_000,  # pytorch_optimizer's max_precondition_dim
            "shards": "soap needs the eigenvectors of whole matrices, and pytorch_optimizer 4.1.0 cannot"
            " compute them from shards (it mixes sharded and whole tensors, and fails)",
        },
        betas=(0.95, 0.95), eps=1e-8, weight_decay=0.01, precondition_frequency=10,
    ),
    "prodigy": _published(
        "arXiv 2306.06101, konstmish/prodigy: lr 1", (4, 4),
        {
            "accesses": 34.0,
            "shards": "prodigy scales all its steps by one estimate over all parameters, and"
            " pytorch_optimizer 4.1.0 cannot sum it over shards (it fails on them, and would otherwise count"
            " only those of its own process)",
        },
        betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, d_coef=1.0,
    ),
    "schedule-free-adamw": _published(
        "arXiv 2405.15682, facebookresearch/schedule_free", (2, 2),
        {"stores_trained": True, "accesses": 29.0},
        betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0,
    ),
    "mars": _published(
        "arXiv 2411.10438, AGI-Arena/MARS (MARS-AdamW)", (3, 3), {"accesses": 42.0},
        betas=(0.95, 0.99), gamma=0.025, eps=1e-8, weight_decay=0.0,
    ),
    "sophia": _published(
        "arXiv 2305.14342, Liuhong99/Sophia (Sophia-G)", (2, 2),
        {
            "accesses": 17.0,
            "pipelines": "sophia makes a second pass over a batch, with labels that the model draws; a"
            " pipeline cannot do that",
            "objectives": "sophia estimates the Hessian from labels that the model draws"
            " (Gauss-Newton-Bartlett), which needs cross-entropy over the tokens of a step",
            "skipped_steps": "sophia takes a batch into its Hessian before its loss is known, so no step can"
            " be skipped",
        },
        betas=(0.965, 0.99), rho=0.04, hessian_interval=10, eps=1e-15, weight_decay=0.1,
    ),
}  # fmt: skip
