"""Pairs of sequences, or single ones, of prompt and completion: their stored arrays, and their packing.

Invariants:
- A pair is in one row, as two separate documents, each of which begins with the prompt.
- The rows depend on the lengths of the pairs and on the sequence length alone.
- Loading executes nothing: arrays are opened with `allow_pickle=False`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apertus_model.data.tokens.packing import PackedRow, complete_array, fill_row, load_array, pack
from infra.store import StoreError
from specs.errors import StageError


class PreferenceDataError(StageError):
    """Pairs that cannot be packed into sequences of the length that the spec states."""


class PackedPairs:
    """`rows` packed rows of `sequences` sequences; 2k and 2k + 1 are the chosen and the rejected one of pair
    k. `sides`: 2, or 1 for single sequences, each of which counts as a pair without its other side; `width`:
    twice the largest number of pairs in a row."""

    def __init__(
        self, arrays: dict[str, NDArray[Any]], *, sequence_length: int, pad_id: int, sides: int = 2
    ) -> None:
        """`arrays`: those of `pair_arrays`. PreferenceDataError when a pair is longer than a row."""
        self.sides = sides
        self._tokens, self._lengths = arrays["tokens"], arrays["lengths"]
        self._prompt_lengths = arrays["prompt_lengths"]
        self._starts = np.concatenate([[0], np.cumsum(self._lengths)])
        self._sequence_length, self._pad_id = sequence_length, pad_id
        pair_lengths = self._lengths.reshape(-1, sides).sum(axis=1)
        if pair_lengths.max(initial=0) > sequence_length:
            raise PreferenceDataError(
                f"a pair has {pair_lengths.max()} tokens, which does not fit into a sequence of"
                f" {sequence_length}. Fix: use the sequence_length of the stage that made the preference data"
            )
        self._packed = pack(pair_lengths, sequence_length)
        self.rows = len(self._packed)
        self.sequences = int(self._lengths.size)
        self.width = 2 * max((row.size for row in self._packed), default=0)

    def trained_rows(self) -> NDArray[np.int64]:
        """The rows with a pair to train on, in stored order."""
        return np.arange(self.rows)

    def pairs_of(self, row: int) -> NDArray[np.int64]:
        """The pairs of a row, in the order of its segments: (pairs of the row,) int64."""
        return self._packed[row].astype(np.int64)

    def sequence_ids(self, row: int) -> NDArray[np.int64]:
        """Ids of the sequences of a row, in the order of its segments: (sequences of the row,) int64."""
        return (self.sides * self.pairs_of(row)[:, None] + np.arange(self.sides)).reshape(-1)

    def filled(self, row: int) -> tuple[NDArray[np.int64], PackedRow, list[int]]:
        """The ids of the sequences of a row in stored order, the row's content, in which the tokens of
        completions are labels, and the lengths of the sequences. IndexError outside of `range(rows)`."""
        if not 0 <= row < self.rows:
            raise IndexError(f"row {row} of {self.rows}")
        ids = self.sequence_ids(row)
        pieces = []
        for sequence in ids.tolist():
            start, size = int(self._starts[sequence]), int(self._lengths[sequence])
            tokens = self._tokens[start : start + size].astype(np.int64)
            pieces.append((tokens, np.arange(size) >= self._prompt_lengths[sequence]))
        lengths = [tokens.size for tokens, _ in pieces]
        return ids, fill_row(pieces, self._sequence_length, self._pad_id), lengths


def padded(values: NDArray[Any], width: int, step: int = 1) -> NDArray[Any]:
    """Values of a row's sequences or pairs, in every `step`-th place, with zeros up to `width`."""
    spread = np.zeros(width, values.dtype)
    spread[: step * values.size : step] = values
    return spread


def pair_arrays(
    folder: Any, names: tuple[str, ...], prefix: str = "", per_pair: tuple[str, ...] = (), sides: int = 2
) -> dict[str, NDArray[Any]]:
    """The stored arrays `tokens`, `names` (a value per sequence) and `per_pair` of an artifact. StoreError
    when their sizes do not fit together."""
    arrays = {name: load_array(folder.local(f"{prefix}{name}.npy")) for name in ("tokens", *names, *per_pair)}
    sequences = arrays["lengths"].size
    fits = all(arrays[name].size == sequences for name in names)
    fits = fits and all(2 * arrays[name].size == sequences for name in per_pair)
    if not fits or sequences % sides or arrays["tokens"].size != arrays["lengths"].sum():
        raise StoreError(
            f"the arrays of {folder.path} do not belong together; remove its folder to have it made again"
        )
    return arrays


class SequenceWriter:
    """A writer of `<prefix>{tokens,lengths,prompt_lengths}.npy` in `folder`, in bounded memory."""

    def __init__(self, folder: Path, prefix: str = "") -> None:
        self._folder, self._prefix = folder, prefix
        self.lengths: list[int] = []
        self._prompt_lengths: list[int] = []

    def __enter__(self) -> SequenceWriter:
        self._tokens = open(self._path("tokens.bin"), "wb")  # closed by __exit__
        return self

    def __exit__(self, *error: object) -> None:
        self._tokens.close()

    def _path(self, name: str) -> Path:
        return self._folder / f"{self._prefix}{name}"

    def add(self, prompt: Sequence[int], completion: Sequence[int]) -> None:
        tokens = np.array([*prompt, *completion], "<i4")
        self._tokens.write(tokens.tobytes())
        self.lengths.append(tokens.size)
        self._prompt_lengths.append(len(prompt))

    def finish(self) -> list[str]:
        """Writes the arrays and returns their names. Nothing can be added afterwards."""
        self._tokens.close()
        complete_array(self._path("tokens.bin"), self._path("tokens.npy"), np.dtype("<i4"))
        for name, values in (("lengths", self.lengths), ("prompt_lengths", self._prompt_lengths)):
            np.save(self._path(f"{name}.npy"), np.array(values, np.int64), allow_pickle=False)
        return [f"{self._prefix}{name}.npy" for name in ("tokens", "lengths", "prompt_lengths")]
