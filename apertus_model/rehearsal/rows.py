"""Samples of the shape that each kind of training reads: whole rows, every label trained, which is the
largest number that a step can have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from apertus_model.data.stream import IGNORE_INDEX
from apertus_model.rehearsal.records import PAIRS
from specs.stages.distill import DistillSegment
from specs.stages.training import Segment


class Rows:
    """Rows that are all the same: one document that fills the row, and for preference data pairs of equal
    lengths."""

    def __init__(self, segment: Segment) -> None:
        length = segment.sequence_length
        sequences = 2 * PAIRS
        part = -(-length // sequences)
        one = np.ones(sequences, dtype=np.float32)
        preference = segment.objective in ("qrpo", "dpo", "bradley-terry")
        normalised = segment.objective in ("normalised-cross-entropy", "inverse-rl")
        k = segment.top_k or 0 if isinstance(segment, DistillSegment) else 0
        labels = np.zeros(length, dtype=np.int64)
        if segment.objective == "bradley-terry":  # a label at the end of each sequence
            labels[(np.arange(length) + 1) % part != 0] = IGNORE_INDEX
            labels[-1] = 0
        self._row = SimpleNamespace(
            input=np.zeros(length, dtype=np.int64),
            labels=labels,
            positions=np.arange(length) % part if preference else np.arange(length),
            weights=np.ones((length, 1) if normalised else length, dtype=np.float32),
            counts=np.ones(1),
            segments=np.arange(length) // part,
            rewards=one / 2,
            reference=-one,
            margins=np.zeros(PAIRS, dtype=np.float32),
            teacher_words=np.zeros((length, k), dtype=np.int32) + np.arange(k, dtype=np.int32),
            teacher_log_p=np.full((length, k + 1), -np.log(k + 1), dtype=np.float32),
            source=0,
            present=one[::2] > 0 if segment.objective == "bradley-terry" else one > 0,
        )

    def __getitem__(self, index: int) -> Any:
        return self._row


@dataclass(frozen=True)
class Data:
    """The data of a rehearsed segment; nothing is held out."""

    samples: Rows
    heldout: Mapping[str, Sequence[Any]] = field(default_factory=dict)
