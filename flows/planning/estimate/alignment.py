"""Floating-point operations of a step that compares the mixers of a student with its teacher's attention
(`trainer/objectives/alignment.py`): the teacher runs up to the last compared layer, and of the student only
the mixers run, whose inputs have no gradients. There is no recomputation."""

from __future__ import annotations

from specs.stages.distill import DistillSegment


def training(segment: DistillSegment) -> int:
    """The operations per token, with those of the teacher."""
    return teacher(segment) + student(segment)


def teacher(segment: DistillSegment) -> int:
    """The operations of the teacher per token: attention of every layer up to the last compared one, and the
    feed-forward of the layers before it; for a comparison of matrices, also projections and scores of the
    compared layers again."""
    model, length = segment.teacher, segment.sequence_length
    compared = segment.model.mamba_layers
    read = 2 * model.dim * (model.query_dim + 2 * model.key_dim)
    attention = read + 2 * model.query_dim * model.dim + 2 * int(model.scores(length))
    feed_forward = 2 * model.ffn_matrices * model.dim * model.ffn_dim
    total = (compared[-1] + 1) * attention + compared[-1] * feed_forward
    if segment.loss.compare == "matrix":
        total += len(compared) * (read + 2 * model.query_dim * length)
    return total


def student(segment: DistillSegment) -> int:
    """The operations of all mixers of the student per token: forward once; backward once for each trained
    matrix, and twice for products and for the output projection, whose input has a gradient."""
    model, length = segment.model, segment.sequence_length
    keys, queries = 2 * model.dim * model.key_dim, 2 * model.dim * model.query_dim
    steps, products = 2 * model.dim * model.n_heads, 2 * model.mamba_products(length)
    if segment.loss.compare == "matrix":  # which depends on neither values nor gates
        one = 2 * (queries + keys + steps) + keys + 3 * 2 * model.query_dim * length
    else:
        one = 2 * (2 * queries + 2 * keys + steps) + 3 * (queries + products)
    return len(model.mamba_layers) * one
