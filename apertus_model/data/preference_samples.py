"""Pairs of completions as packed training sequences.

Invariants:
- A pair is never divided: its two sequences are in the same row, each a separate document that begins with
  the prompt.
- The rows depend on the lengths of the pairs and on the sequence length alone; only their order depends on
  the seed. So reference log-probabilities, which are computed row by row in stored order, are computed over
  the rows that training sees.
- Loading executes nothing: arrays are opened with `allow_pickle=False`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apertus_model.data.packing import fill_row, pack
from apertus_model.data.permutation import KeyedPermutation
from apertus_model.data.stream import IGNORE_INDEX
from infra.store import Artifact, StoreError
from specs.errors import StageError


class PreferenceDataError(StageError):
    """Pairs that cannot be packed into sequences of the length that the spec states."""


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


class PreferenceSamples:
    """`samples[i]` is training sample i, for ever: row permutation(i mod rows), with another permutation per
    epoch (i // rows).

    Attributes:
        rows: number of packed sequences.
        sequences: 2 x number of pairs.
        width: S, the largest number of sequences in a row.
    """

    def __init__(
        self,
        arrays: dict[str, NDArray[Any]],
        reference: NDArray[np.float32] | None,
        *,
        sequence_length: int,
        seed: int,
        pad_id: int,
    ) -> None:
        self._tokens, self._lengths, self._prompt_lengths = (
            arrays["tokens"],
            arrays["lengths"],
            arrays["prompt_lengths"],
        )
        self._rewards = arrays["rewards"]
        self._reference = np.zeros_like(self._rewards) if reference is None else reference
        self._starts = np.concatenate([[0], np.cumsum(self._lengths)])
        self._sequence_length, self._seed, self._pad_id = sequence_length, seed, pad_id
        pair_lengths = self._lengths.reshape(-1, 2).sum(axis=1)
        if pair_lengths.max(initial=0) > sequence_length:
            raise PreferenceDataError(
                f"a pair has {pair_lengths.max()} tokens, which does not fit into a sequence of"
                f" {sequence_length}. Fix: sequence_length, as in the stage that made the preference data"
            )
        self._packed = pack(pair_lengths, sequence_length)
        self.rows = len(self._packed)
        self.sequences = int(self._lengths.size)
        self.width = 2 * max((row.size for row in self._packed), default=0)

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
        names = ("tokens", "lengths", "prompt_lengths", "rewards")
        arrays = {name: load_array(pairs.local(f"{name}.npy")) for name in names}
        sizes = {arrays[name].size for name in names[1:]}
        if len(sizes) != 1 or arrays["lengths"].size % 2 or arrays["tokens"].size != arrays["lengths"].sum():
            raise StoreError(
                f"the arrays of {pairs.path} do not belong together; remove its folder to have it made again"
            )
        reference = None
        if log_probabilities is not None:
            reference = load_array(log_probabilities.local("log_probabilities.npy"))
            if reference.shape != arrays["lengths"].shape:
                raise StoreError(
                    f"{log_probabilities.path} has {reference.size} log-probabilities, {pairs.path} has"
                    f" {arrays['lengths'].size} sequences"
                )
        return cls(arrays, reference, sequence_length=sequence_length, seed=seed, pad_id=pad_id)

    def sequence_ids(self, row: int) -> NDArray[np.int64]:
        """Ids of the sequences of a row, in the order of its segments: (sequences of the row,) int64."""
        pairs = self._packed[row]
        return np.stack([2 * pairs, 2 * pairs + 1], axis=1).reshape(-1).astype(np.int64)

    def row(self, row: int) -> PreferenceSample:
        """A row in stored order. IndexError outside of `range(rows)`."""
        if not 0 <= row < self.rows:
            raise IndexError(f"row {row} of {self.rows}")
        ids = self.sequence_ids(row)
        pieces = []
        for sequence in ids.tolist():
            start, size = int(self._starts[sequence]), int(self._lengths[sequence])
            tokens = self._tokens[start : start + size].astype(np.int64)
            pieces.append((tokens, np.arange(size) >= self._prompt_lengths[sequence]))
        filled = fill_row(pieces, self._sequence_length, self._pad_id)
        segments = np.full(self._sequence_length, -1, np.int64)
        for segment, (start, (tokens, _)) in enumerate(zip(filled.starts, pieces, strict=True)):
            inside = slice(start, start + tokens.size)
            segments[inside] = np.where(filled.labels[inside] != IGNORE_INDEX, segment, -1)
        rewards, reference = self._padded(self._rewards[ids]), self._padded(self._reference[ids])
        present = np.arange(self.width) < ids.size
        return PreferenceSample(
            filled.input, filled.labels, filled.positions, segments, rewards, reference, present
        )

    def __getitem__(self, i: int) -> PreferenceSample:
        """Sample i, i >= 0, in training order. IndexError for a negative index."""
        if i < 0:
            raise IndexError(f"sample {i}")
        epoch, place = divmod(i, self.rows)
        return self.row(KeyedPermutation(self.rows, self._seed, epoch, "preference rows")(place))

    def epochs(self, n: int) -> list[float]:
        """Passes over the pairs after n samples: one number, for the one source."""
        return [n / self.rows]

    def _padded(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        padded = np.zeros(self.width, np.float32)
        padded[: values.size] = values
        return padded


def load_array(path: Path) -> NDArray[Any]:
    """An .npy file, mapped into memory; never unpickled."""
    return np.load(path, mmap_mode="r", allow_pickle=False)
