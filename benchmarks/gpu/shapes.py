"""The models that are trained, the contenders that train them, and what each needs.

Invariant: contenders of a shape train the same number of tokens a step, in the same micro-batches, with
AdamW, float32 weights and moments. Nothing here loads torch.
"""

from __future__ import annotations

from dataclasses import dataclass
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
from specs.stages.training import Segment

RECIPES = Path(__file__).parents[2] / "specs" / "recipes"
SEED = 1
CONTEXT = 2e9  # bytes of a GPU that a process has beside its tensors
BARE_MEMORY = 1.3  # of the bare loop, relative to our trainer, beside whole logits
LIMIT, TITAN, BARE = "limit", "torchtitan", "transformers, bare loop"
BESIDE = {  # the peers with which a contender's speed is compared
    "ours, compiled": (f"{TITAN}, compiled", BARE),
    "ours, eager": (f"{TITAN}, eager", BARE),
    "ours, float8": (f"{TITAN}, compiled", BARE),
    "ours, deterministic": ("ours, compiled",),
}


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
class Trial:
    """One way to train a shape, or its limit."""

    shape: Shape
    name: str
    kind: Literal["limit", "ours", "torchtitan", "transformers"]
    compiled: bool = False
    float8: bool = False
    deterministic: bool = False
    graphs: bool = False  # CUDA graphs

    @cached_property
    def model(self) -> ModelSpec:
        """torchtitan's Llama has a gate, thus three matrices of two thirds the width, and no norm of queries
        and keys."""
        model = self.shape.model
        if self.kind != "torchtitan":
            return model
        llama = {"activation": "swiglu", "ffn_dim": model.ffn_dim * 2 // 3, "qk_norm": False}
        return model.model_copy(update=llama)

    @cached_property
    def segment(self) -> Segment:
        """A training that does not end while it is measured."""
        shape = self.shape
        return Segment(
            model=self.model,
            seed=SEED,
            sequence_length=shape.length,
            global_batch_size=shape.batch,
            micro_batch_size=shape.micro_batch,
            optimizer=OptimizerSpec(name="adamw", lr=1e-4, grad_clip=1.0).resolved({}),
            schedule=Schedule(),
            precision=Precision(param=shape.precision, linear="float8" if self.float8 else "param"),
            compile=self.compiled,
            deterministic=self.deterministic,
            end_step=1_000_000,
            checkpoint={"interval": 2_000_000},
        )

    @property
    def memory(self) -> float:
        """Bytes of a GPU, estimated."""
        logits = self.shape.micro_batch * self.shape.length * self.model.vocab_size
        if self.kind == "limit":
            return CONTEXT + 3 * self.model.parameters + 4 * logits
        planned = memory_of_rank(self.segment, 1, 0).total
        if self.kind == "transformers":  # logits, their float32 copy and gradients are whole
            planned = BARE_MEMORY * planned + 12 * logits
        return CONTEXT + planned

    def obstacle(self, capability: tuple[int, int] | None) -> str:
        """Why it is not measured on a GPU of this compute capability, or on the CPU; empty if it is."""
        if self.compiled and capability is None:
            return "compiled layers are compared on a GPU"
        if self.float8 and capability is not None and capability < (8, 9):
            return "this GPU has no float8"
        return ""

    def share_of_peak(self, tokens_per_second: float, gpu: str) -> float:
        """Model FLOPs utilisation."""
        return tokens_per_second * flops.training(self.segment) / flops.peak(self.segment, GPUS[gpu])


def trials(shape: Shape) -> list[Trial]:
    """The limit of a shape, and its contenders, the most important first."""
    return [
        Trial(shape, LIMIT, "limit"),
        Trial(shape, "ours, compiled", "ours", compiled=True),
        Trial(shape, f"{TITAN}, compiled", "torchtitan", compiled=True),
        Trial(shape, "ours, eager", "ours"),
        Trial(shape, f"{TITAN}, eager", "torchtitan"),
        Trial(shape, BARE, "transformers"),
        Trial(shape, "ours, float8", "ours", compiled=True, float8=True),
        Trial(shape, f"{TITAN}, CUDA graphs", "torchtitan", compiled=True, graphs=True),
        Trial(shape, "ours, deterministic", "ours", compiled=True, deterministic=True),
    ]


def shapes() -> list[Shape]:
    """The shapes that a GPU trains."""
    wide = pretraining("apertus-8b", "pretrain").model_copy(update={"n_layers": 4})
    small = ModelSpec(
        dim=768, n_layers=12, n_heads=12, n_kv_heads=12, head_dim=64, ffn_dim=4608, vocab_size=32_768
    )
    return [
        Shape("8B, four layers", wide, 4096, 1, 4, steps=5),
        Shape("160M", small, 1024, 4, 8, steps=40),
        Shape("1.5B", pretraining("apertus-1.5b-100b", "pretrain-apertus"), 4096, 2, 8, steps=4),
    ]


def pretraining(recipe: str, stage: str) -> ModelSpec:
    """The model of a recipe's stage."""
    return load(RECIPES / f"{recipe}.yaml", ()).stages[stage].model


def tiny(shape: Shape) -> Shape:
    """The same shape for a CPU, in float32."""
    few = {"dim": 64, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "ffn_dim": 96, "vocab_size": 256}
    model = shape.model.model_copy(update={**few, "n_layers": min(shape.model.n_layers, 4) // 2})
    return Shape(f"{shape.name}, tiny", model, 64, 1, 2, steps=min(shape.steps, 8), precision="float32")
