"""The models that are trained, the contenders that train them, and what each measurement is.

Invariant: contenders of a shape train the same number of tokens a step, in the same micro-batches, with
AdamW, float32 weights and moments. Nothing here loads torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from flows.planning.estimate import flops
from flows.planning.estimate.memory import memory_of_rank
from specs.cluster import GPUS
from specs.model import ModelSpec
from specs.optimizer import OptimizerSpec
from specs.recipe import load
from specs.schedule import Schedule
from specs.settings import Precision
from specs.stages.pretrain import PretrainStage
from specs.stages.training import Segment

RECIPES = Path(__file__).parents[2] / "specs" / "recipes"
SEED = 1
CONTEXT = 2e9  # bytes of a GPU that a process has beside its tensors
BARE_MEMORY = 1.3  # of the bare loop, relative to our trainer, beside whole logits
LIMIT = "limit"


@dataclass(frozen=True)
class Shape:
    """A model and its batch, in sequences of `length` tokens."""

    name: str
    model: ModelSpec
    length: int
    micro_batch: int
    batch: int
    steps: int  # of a round
    precision: Literal["float32", "bfloat16"] = "bfloat16"

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.length


@dataclass(frozen=True)
class Contender:
    """A way to train, or the limit."""

    name: str
    kind: Literal["limit", "ours", "torchtitan", "transformers"]
    compiled: bool = False
    float8: bool = False
    deterministic: bool = False
    graphs: bool = False  # CUDA graphs
    beside: tuple[str, ...] = ()  # names of the peers with which its speed is compared


TITAN, BARE = "torchtitan", "transformers, bare loop"
CONTENDERS = (  # the most important ones first
    Contender("ours, compiled", "ours", compiled=True, beside=(f"{TITAN}, compiled", BARE)),
    Contender(f"{TITAN}, compiled", "torchtitan", compiled=True),
    Contender("ours, eager", "ours", beside=(f"{TITAN}, eager", BARE)),
    Contender(f"{TITAN}, eager", "torchtitan"),
    Contender(BARE, "transformers"),
    Contender("ours, float8", "ours", compiled=True, float8=True, beside=(f"{TITAN}, compiled", BARE)),
    Contender(f"{TITAN}, CUDA graphs", "torchtitan", compiled=True, graphs=True),
    Contender("ours, deterministic", "ours", compiled=True, deterministic=True, beside=("ours, compiled",)),
)


@dataclass(frozen=True)
class Task:
    """One contender with one shape."""

    shape: Shape
    contender: Contender

    @cached_property
    def model(self) -> ModelSpec:
        """That of the contender: torchtitan's Llama has a gate, thus three matrices of two thirds the width,
        and no norm of queries and keys."""
        if self.contender.kind != "torchtitan":
            return self.shape.model
        return self.shape.model.model_copy(
            update={"activation": "swiglu", "ffn_dim": self.shape.model.ffn_dim * 2 // 3, "qk_norm": False}
        )

    @cached_property
    def segment(self) -> Segment:
        """A training that does not end while it is measured."""
        shape, contender = self.shape, self.contender
        return Segment(
            model=self.model,
            seed=SEED,
            sequence_length=shape.length,
            global_batch_size=shape.batch,
            micro_batch_size=shape.micro_batch,
            optimizer=OptimizerSpec(name="adamw", lr=1e-4, grad_clip=1.0).resolved({}),
            schedule=Schedule(),
            precision=Precision(param=shape.precision, linear="float8" if contender.float8 else "param"),
            compile=contender.compiled,
            deterministic=contender.deterministic,
            end_step=1_000_000,
            checkpoint={"interval": 2_000_000},
        )

    @property
    def memory(self) -> float:
        """Bytes of a GPU, estimated."""
        logits = self.shape.micro_batch * self.shape.length * self.model.vocab_size
        if self.contender.kind == "limit":
            return CONTEXT + 3 * self.model.parameters + 4 * logits
        planned = memory_of_rank(self.segment, 1, 0).total
        if self.contender.kind == "transformers":  # logits, their float32 copy and gradients are whole
            planned = BARE_MEMORY * planned + 12 * logits
        return CONTEXT + planned

    def share_of_peak(self, tokens_per_second: float, gpu: str) -> float:
        """Model FLOPs utilisation."""
        return tokens_per_second * flops.training(self.segment) / flops.peak(self.segment, GPUS[gpu])


def shapes() -> list[Shape]:
    """The shapes that a GPU trains."""
    wide, whole = pretraining("apertus-8b", "pretrain"), pretraining("apertus-1.5b-100b", "pretrain-apertus")
    small = ModelSpec(
        dim=768, n_layers=12, n_heads=12, n_kv_heads=12, head_dim=64, ffn_dim=4608, vocab_size=32_768
    )
    return [
        Shape("8B, four layers", wide.model_copy(update={"n_layers": 4}), 4096, 1, 4, steps=5),
        Shape("160M", small, 1024, 4, 8, steps=40),
        Shape("1.5B", whole, 4096, 2, 8, steps=4),
    ]


def pretraining(recipe: str, stage: str) -> ModelSpec:
    """The model of a recipe's stage."""
    pretrain = load(RECIPES / f"{recipe}.yaml", ()).stages[stage]
    assert isinstance(pretrain, PretrainStage)
    return pretrain.model


def tiny(shape: Shape) -> Shape:
    """The same shape for a CPU, in float32."""
    few = {"dim": 64, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "ffn_dim": 96, "vocab_size": 256}
    model = shape.model.model_copy(update={**few, "n_layers": min(shape.model.n_layers, 4) // 2})
    return replace(
        shape, model=model, length=64, micro_batch=1, batch=2, steps=min(shape.steps, 8), precision="float32"
    )
