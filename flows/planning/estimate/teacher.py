"""Estimates what the distillation loss adds to the memory and the operations of a step.

The teacher is frozen: its weights have the precision of the pass, are sharded like the student's and gathered
group by group, and it keeps nothing for a backward pass. It reads a micro-batch while the student's output
layer waits, so that the pass of its last layer and the student's activations are in memory together, and
after that its output weight, its last states and the chunks of the loss. In a pipeline, the last process
holds the whole teacher.
"""

from __future__ import annotations

from dataclasses import dataclass

from specs.model import ModelSpec
from specs.stages.distill import DistillSegment
from specs.stages.training import Segment


def teacher_of(segment: Segment) -> ModelSpec | None:
    """The teacher that runs beside the student."""
    return segment.teacher if isinstance(segment, DistillSegment) and segment.top_k is None else None


@dataclass(frozen=True)
class TeacherMemory:
    """Bytes of a teacher on one GPU."""

    weights: float = 0.0  # the rank's shard, and a table of positions
    layers: float = 0.0  # two gathered layers, one of them prefetched
    layer: float = 0.0  # tensors of a layer's pass
    head: float = 0.0  # gathered last norm and output weight
    states: float = 0.0  # the last hidden states, before and after the norm


def teacher_memory(segment: Segment, *, tokens: float, b: int, shards: int, single: bool) -> TeacherMemory:
    """The teacher's memory on the process that computes the loss.

    Args:
        segment: the training segment.
        tokens: those of a micro-batch on this rank.
        b: bytes of an element.
        shards: processes that share the weights.
        single: whether the weights are on one process, which gathers nothing.
    """
    if (model := teacher_of(segment)) is None:
        return TeacherMemory()
    tp, copies = segment.parallel.tp, 0 if single else 1
    layer = model.layer_matrices / tp + model.layer_vectors
    table = model.vocab_size * model.dim / tp
    weights = model.n_layers * layer + 2 * table + model.dim
    wide = (2 if model.activation == "xielu" else 3) * model.ffn_dim / tp
    return TeacherMemory(
        weights=b * weights / shards + 4.0 * segment.sequence_length * 2 * model.head_dim,
        layers=copies * b * 2 * layer,
        layer=b * tokens * (2 * model.dim + wide),
        head=copies * b * (table + model.dim),
        states=2 * b * tokens * model.dim,
    )
