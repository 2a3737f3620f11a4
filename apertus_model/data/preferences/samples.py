"""Pairs of completions, or single ones, as packed training sequences, with rewards and reference
probabilities.

Invariants:
- Reference log-probabilities are computed row by row, in stored order, over the rows that training sees.
- Sample i of (sets, repeats, seed) is the same row for ever. An epoch has every row of a set as often as its
  repeats say (`apertus_model.data.order.permutation`), in an order that differs from epoch to epoch.
- A row belongs to one set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apertus_model.data.order.permutation import cached_permutation, times_seen
from apertus_model.data.preferences.packed_pairs import PackedPairs, padded, pair_arrays
from apertus_model.data.preferences.reward_samples import RewardSamples
from apertus_model.data.tokens.packing import load_array
from apertus_model.data.tokens.stream import IGNORE_INDEX
from infra.store import Artifact, StoreError
from specs.errors import StageError


@dataclass(frozen=True)
class PreferenceSample:
    """A packed row of L tokens with up to S sequences: 2k and 2k + 1 are the chosen and the rejected one of a
    pair. A single completion is sequence 2k, and 2k + 1 is absent."""

    input: NDArray[np.int64]  # (L,), ends with padding tokens
    labels: NDArray[np.int64]  # (L,), next tokens within a completion, else IGNORE_INDEX
    positions: NDArray[np.int64]  # (L,), from 0 in each sequence, and in the padding
    segments: NDArray[np.int64]  # (L,), index of the label's sequence in the row; -1 for IGNORE_INDEX
    rewards: NDArray[np.float32]  # (S,), quantiles
    reference: NDArray[np.float32]  # (S,), log-probabilities of the completions under the reference model
    present: NDArray[np.bool_]  # (S,)


class PreferenceSamples(PackedPairs):
    """The rows of one set of pairs, in stored order. `PreferenceSets` has the order of training."""

    def __init__(
        self,
        arrays: dict[str, NDArray[Any]],
        reference: NDArray[np.float32] | None,
        *,
        sequence_length: int,
        pad_id: int,
        sides: int = 2,
    ) -> None:
        super().__init__(arrays, sequence_length=sequence_length, pad_id=pad_id, sides=sides)
        self._rewards = arrays["rewards"]
        self._reference = np.zeros_like(self._rewards) if reference is None else reference
        self._kept = np.ones(self.sequences // sides, np.bool_)

    @classmethod
    def open(
        cls,
        pairs: Artifact,
        log_probabilities: Artifact | None,
        *,
        sequence_length: int,
        pad_id: int,
        sides: int = 2,
    ) -> PreferenceSamples:
        """Opens stored pairs: an artifact of kind `pairs`, `labelled_pairs` (those to train on, with rewards
        of 0) or, if `sides` is 1, `rewarded_completions`. `log_probabilities`: those of the same pairs under
        the reference model; None stands for zeros. PreferenceDataError when a pair is longer than a row,
        StoreError when a file is damaged, or the log-probabilities are of other pairs."""
        if pairs.manifest.kind == "labelled_pairs":
            arrays = pair_arrays(pairs, ("lengths", "prompt_lengths"), "train-")
            arrays["rewards"] = np.zeros(arrays["lengths"].size, np.float32)
        else:
            arrays = pair_arrays(pairs, ("lengths", "prompt_lengths", "rewards"), sides=sides)
        reference = None
        if log_probabilities is not None:
            reference = load_array(log_probabilities.local("log_probabilities.npy"))
            if reference.shape != arrays["lengths"].shape:
                raise StoreError(
                    f"{log_probabilities.path} has {reference.size} log-probabilities, {pairs.path} has"
                    f" {arrays['lengths'].size} sequences"
                )
        return cls(arrays, reference, sequence_length=sequence_length, pad_id=pad_id, sides=sides)

    def keep(self, kept: NDArray[np.bool_]) -> None:
        """Restricts training to the pairs that are `kept`: (pairs,). The others stay in their rows, so that
        the rows are those of the reference log-probabilities, and have no labels."""
        self._kept = kept

    def trained_rows(self) -> NDArray[np.int64]:
        return np.array([row for row in range(self.rows) if self._kept[self.pairs_of(row)].any()], np.int64)

    def row(self, row: int) -> PreferenceSample:
        """A row in stored order. IndexError outside of `range(rows)`."""
        ids, filled, lengths = self.filled(row)
        kept, labels, step = self._kept[ids // self.sides], filled.labels, 2 // self.sides
        segments = np.full(labels.size, -1, np.int64)
        for segment, (start, length) in enumerate(zip(filled.starts, lengths, strict=True)):
            inside = slice(start, start + length)
            if kept[segment]:
                segments[inside] = np.where(labels[inside] != IGNORE_INDEX, step * segment, -1)
        labels = np.where(segments >= 0, labels, IGNORE_INDEX)
        rewards, reference, present = (
            padded(values, self.width, step) for values in (self._rewards[ids], self._reference[ids], kept)
        )
        return PreferenceSample(filled.input, labels, filled.positions, segments, rewards, reference, present)


class PreferenceSets:
    """`samples[i]` for i = 0, 1, ..., from sets of pairs. `rows`: number of samples in an epoch."""

    def __init__(
        self, sets: Sequence[PreferenceSamples | RewardSamples], repeats: Sequence[Fraction], *, seed: int
    ) -> None:
        """Raises StageError when no row is left to train on."""
        self.sets = list(sets)
        self._trained = [pairs.trained_rows() for pairs in self.sets]
        self._repeats, self._seed = list(repeats), seed
        width = max(pairs.width for pairs in self.sets)
        for pairs in self.sets:  # the samples of a batch have arrays of one size
            pairs.width = width
        self._latest = (0, self._rows_in(0))
        self.rows = sum(rows.size for rows in self._latest[1])
        if not self.rows:
            raise StageError("no pair is left to train on. Fix: raise repeats, or add preference data")

    def place(self, i: int) -> tuple[int, int]:
        """The set and the row of sample i, i >= 0. IndexError for a negative index."""
        if i < 0:
            raise IndexError(f"sample {i}")
        epoch, place = divmod(i, self.rows)
        place = cached_permutation(self.rows, self._seed, epoch, "preference rows")(place)
        known_epoch, sets = self._latest
        if known_epoch != epoch:
            sets = self._rows_in(epoch)
            self._latest = (epoch, sets)  # assigned in one step, since several threads may read it
        for number, rows in enumerate(sets):
            if place < rows.size:
                return number, int(rows[place])
            place -= rows.size
        raise AssertionError("every epoch has as many rows")

    def __getitem__(self, i: int) -> Any:
        """Sample i, i >= 0. IndexError for a negative index."""
        number, row = self.place(i)
        return self.sets[number].row(row)

    def epochs(self, n: int) -> list[float]:
        """Passes over each set after n samples (exact after whole epochs)."""
        return [float(times * n / self.rows) for times in self._repeats]

    def _rows_in(self, epoch: int) -> list[NDArray[np.int64]]:
        """The rows of each set in an epoch."""
        return [
            np.repeat(rows, times_seen(rows.size, times, seed=self._seed, source=number, epoch=epoch))
            for number, (rows, times) in enumerate(zip(self._trained, self._repeats, strict=True))
        ]
