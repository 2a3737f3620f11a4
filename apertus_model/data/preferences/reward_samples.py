"""Labelled pairs as packed training sequences of a reward model.

Invariant: a sequence is rewarded at its last token, the end of the assistant's turn, wherever the row has
padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apertus_model.data.preferences.packed_pairs import PackedPairs, padded, pair_arrays
from apertus_model.data.tokens.stream import IGNORE_INDEX, Split
from infra.store import Artifact


@dataclass(frozen=True)
class RewardSample:
    """A packed row of L tokens with up to P pairs; pair k has sequences 2k (chosen) and 2k + 1 (rejected)."""

    input: NDArray[np.int64]  # (L,), ends with padding tokens
    labels: NDArray[np.int64]  # (L,), the last token of each sequence in its place, else IGNORE_INDEX
    positions: NDArray[np.int64]  # (L,), from 0 in each sequence, and in the padding
    segments: NDArray[np.int64]  # (L,), index of the label's sequence in the row; -1 for IGNORE_INDEX
    margins: NDArray[np.float32]  # (P,)
    present: NDArray[np.bool_]  # (P,)


class RewardSamples(PackedPairs):
    """The rows of labelled pairs, in stored order, which `PreferenceSets` changes for training. `margins`:
    (pairs,) float32; `sources`: (pairs,) int32, index of the conversations that each pair is from."""

    def __init__(self, arrays: dict[str, NDArray[Any]], *, sequence_length: int, pad_id: int) -> None:
        super().__init__(arrays, sequence_length=sequence_length, pad_id=pad_id)
        self.margins, self.sources = arrays["margins"], arrays["sources"]

    @classmethod
    def open(cls, pairs: Artifact, split: Split, *, sequence_length: int) -> RewardSamples:
        """Opens a split of an artifact of kind `labelled_pairs`. PreferenceDataError when a pair is longer
        than a row, StoreError when a file is damaged."""
        arrays = pair_arrays(pairs, ("lengths", "prompt_lengths"), f"{split}-", ("margins", "sources"))
        pad_id = pairs.manifest.facts["pad_id"]
        return cls(arrays, sequence_length=sequence_length, pad_id=pad_id)

    def row(self, row: int) -> RewardSample:
        """A row in stored order. IndexError outside of `range(rows)`."""
        ids, filled, lengths = self.filled(row)
        labels = np.full_like(filled.input, IGNORE_INDEX)
        segments = np.full_like(filled.input, -1)
        ends = np.array(filled.starts) + np.array(lengths) - 1
        labels[ends], segments[ends] = filled.input[ends], np.arange(ids.size)
        width = self.width // 2
        margins, present = padded(self.margins[ids[::2] // 2], width), np.arange(width) < ids.size // 2
        return RewardSample(filled.input, labels, filled.positions, segments, margins, present)

    def of_source(self, source: int) -> RewardSamples:
        """The pairs of one source alone."""
        kept = np.flatnonzero(self.sources == source)
        ids = np.stack([2 * kept, 2 * kept + 1], axis=1).reshape(-1)
        tokens = [
            self._tokens[self._starts[sequence] : self._starts[sequence + 1]] for sequence in ids.tolist()
        ]
        arrays = {
            "tokens": np.concatenate(tokens) if tokens else self._tokens[:0],
            "lengths": self._lengths[ids],
            "prompt_lengths": self._prompt_lengths[ids],
            "margins": self.margins[kept],
            "sources": self.sources[kept],
        }
        return RewardSamples(arrays, sequence_length=self._sequence_length, pad_id=self._pad_id)
