"""Pairs of completions as packed training sequences, with their quantile rewards and their log-probabilities
under a reference model.

Invariant: reference log-probabilities, which are computed row by row in stored order, are computed over the
rows that training sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apertus_model.data.packed_pairs import PackedPairs, load_array, padded, pair_arrays
from apertus_model.data.stream import IGNORE_INDEX
from infra.store import Artifact, StoreError


@dataclass(frozen=True)
class PreferenceSample:
    """A packed row of L tokens with up to S sequences; 2k and 2k + 1 are the chosen and the rejected one of a
    pair."""

    input: NDArray[np.int64]  # (L,), ends with padding tokens
    labels: NDArray[np.int64]  # (L,), next tokens within a completion, else IGNORE_INDEX
    positions: NDArray[np.int64]  # (L,), from 0 in each sequence, and in the padding
    segments: NDArray[np.int64]  # (L,), index in the row of the label's sequence; -1 where it is IGNORE_INDEX
    rewards: NDArray[np.float32]  # (S,), quantiles
    reference: NDArray[np.float32]  # (S,), log-probabilities of the completions under the reference model
    present: NDArray[np.bool_]  # (S,)


class PreferenceSamples(PackedPairs):
    """`samples[i]` is training sample i, for ever: row permutation(i mod rows), with another permutation per
    epoch (i // rows)."""

    def __init__(
        self,
        arrays: dict[str, NDArray[Any]],
        reference: NDArray[np.float32] | None,
        *,
        sequence_length: int,
        seed: int,
        pad_id: int,
    ) -> None:
        super().__init__(arrays, sequence_length=sequence_length, seed=seed, pad_id=pad_id)
        self._rewards = arrays["rewards"]
        self._reference = np.zeros_like(self._rewards) if reference is None else reference

    @classmethod
    def open(
        cls,
        pairs: Artifact,
        log_probabilities: Artifact | None,
        *,
        sequence_length: int,
        seed: int,
        pad_id: int,
    ) -> PreferenceSamples:
        """Opens stored pairs.

        Args:
            pairs: artifact of kind `pairs`.
            log_probabilities: of the same pairs under the reference model, or None for zeros.
            sequence_length: L, tokens of a row.
            seed: of the order of the rows.
            pad_id: token that fills rows up.

        Raises:
            PreferenceDataError: when a pair is longer than a row.
            StoreError: when a file is damaged, or the log-probabilities are of other pairs.
        """
        arrays = pair_arrays(pairs, ("lengths", "prompt_lengths", "rewards"))
        reference = None
        if log_probabilities is not None:
            reference = load_array(log_probabilities.local("log_probabilities.npy"))
            if reference.shape != arrays["lengths"].shape:
                raise StoreError(
                    f"{log_probabilities.path} has {reference.size} log-probabilities, {pairs.path} has"
                    f" {arrays['lengths'].size} sequences"
                )
        return cls(arrays, reference, sequence_length=sequence_length, seed=seed, pad_id=pad_id)

    def row(self, row: int) -> PreferenceSample:
        """A row in stored order. IndexError outside of `range(rows)`."""
        ids, filled, lengths = self.filled(row)
        segments = np.full(filled.labels.size, -1, np.int64)
        for segment, (start, length) in enumerate(zip(filled.starts, lengths, strict=True)):
            inside = slice(start, start + length)
            segments[inside] = np.where(filled.labels[inside] != IGNORE_INDEX, segment, -1)
        rewards, reference = (padded(values[ids], self.width) for values in (self._rewards, self._reference))
        present = np.arange(self.width) < ids.size
        return PreferenceSample(
            filled.input, filled.labels, filled.positions, segments, rewards, reference, present
        )

    def __getitem__(self, i: int) -> PreferenceSample:
        """Sample i, i >= 0, in training order. IndexError for a negative index."""
        return self.row(self.row_of_sample(i))
