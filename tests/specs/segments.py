"""Trajectories of a few stages, which share their data, and the borders of their segments."""

from __future__ import annotations

from typing import Any

from specs.dependencies import order
from specs.document import Document
from specs.recipe import validate
from specs.resolution import resolve
from specs.trajectory import Trajectory

MODEL = {"flavour": "mini"}


def trajectories(pretrain: dict[str, Any], **stages: dict[str, Any]) -> dict[str, Trajectory]:
    base = {
        "kind": "pretrain",
        "model": MODEL,
        "sequence_length": 10,
        "mixture": "m",
        "optimizer": {"lr": 1e-3},
    }
    document = {
        "name": "t",
        "sources": {
            **{name: {"url": "/nowhere", "format": "text"} for name in "st"},
            "talks": {"url": "/nowhere", "format": "chat"},
        },
        "stages": {
            "tok": {"kind": "tokenizer", "sources": ["s"], "vocab_size": 512},
            "c": {"kind": "corpus", "tokenizer": "tok", "sources": {"s": {}, "t": {}}},
            "m": {"kind": "mixture", "weights": {"c/s": 1}},
            "n": {"kind": "mixture", "weights": {"c/s": 1}, "seed": 2},
            "pretrain": base | pretrain,
            **stages,
        },
    }
    pipeline = validate(Document("t.yaml", document))
    return resolve(pipeline, order(pipeline))


def shape(trajectory: Trajectory) -> list[tuple[str, int, int, int]]:
    """(mixture, batch, first sample, end step) of every segment."""
    return [
        (segment.mixture, segment.batch, segment.start_sample, segment.end_step)
        for segment in trajectory.segments
    ]
