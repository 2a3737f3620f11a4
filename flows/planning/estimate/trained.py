"""Counts the parameters of a rank that have gradients and optimizer states: all, those of adapters, or those
that `trainable` names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from specs.model import ModelSpec
from specs.stages.sft import AdaptedSegment
from specs.stages.training import Segment
from specs.trainable import MATRICES, trained


class Trained(NamedTuple):
    """Numbers of trained parameters that one tensor-parallel rank computes with, before FSDP."""

    layer: float  # of the layer that has the most
    matrices: float  # of all layers, in matrices
    embedding: float
    head: float  # last norm and output projection
    total: float


def trained_part(segment: Segment, tp: int = 1) -> Trained | None:
    """The trained parameters of a segment; None if every parameter of the model is trained."""
    model = segment.model
    lora = segment.lora if isinstance(segment, AdaptedSegment) else None
    if lora is not None:
        layer = adapters(model, lora.rank, lora.targets) / tp
        return Trained(layer, model.n_layers * layer, 0.0, 0.0, model.n_layers * layer)
    if not segment.trainable:
        return None
    sizes = {
        name: size / (tp if _divided(name) else 1) for name, size in trained(model, segment.trainable).items()
    }

    def of(*beginnings: str) -> float:
        return sum(size for name, size in sizes.items() if name.startswith(beginnings))

    return Trained(
        layer=max(of(f"layers.{index}.") for index in range(model.n_layers)),
        matrices=sum(size for name, size in sizes.items() if any(part in name for part in MATRICES)),
        embedding=of("tok_embeddings."),
        head=of("norm.", "lm_head."),
        total=of(""),
    )


def _divided(name: str) -> bool:
    """Whether a parameter is divided among tensor-parallel ranks."""
    tables = ("tok_embeddings.weight", "lm_head.weight")
    return name in tables or any(part in name for part in MATRICES)


def adapters(model: ModelSpec, rank: int, targets: Sequence[str]) -> int:
    """The number of trained parameters of the adapters of a layer."""
    queries, keys, dim, ffn = model.query_dim, model.key_dim, model.dim, model.ffn_dim
    sides = {
        "wq": (dim, queries),
        "wk": (dim, keys),
        "wv": (dim, keys),
        "wo": (queries, dim),
        "up_proj": (dim, ffn),
        "down_proj": (ffn, dim),
    }
    return rank * sum(sum(sides[target]) for target in targets)
