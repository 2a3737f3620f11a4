"""Sets of preference data as one sequence of training samples.

Invariants:
- Sample i of (sets, repeats, seed) is the same row for ever. An epoch has every row of a set as often as its
  repeats say (`apertus_model.data.repeats`), in an order that differs from epoch to epoch.
- A row belongs to one set, and is the row over which that set's reference log-probabilities were computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from apertus_model.data.preference_samples import PreferenceSample, PreferenceSamples
from apertus_model.data.repeats import permutation, times_seen
from specs.errors import StageError


class PreferenceSets:
    """`samples[i]` for i = 0, 1, ...

    Attributes:
        rows: number of samples in an epoch.
    """

    def __init__(self, sets: Sequence[PreferenceSamples], repeats: Sequence[Fraction], *, seed: int) -> None:
        """Raises StageError when no row is left to train on."""
        self.sets = list(sets)
        self._trained = [one.trained_rows() for one in self.sets]
        self._repeats, self._seed = list(repeats), seed
        width = max(one.width for one in self.sets)
        for one in self.sets:  # the samples of a batch have arrays of one size
            one.width = width
        self._latest = (0, self._rows_in(0))
        self.rows = sum(rows.size for rows in self._latest[1])
        if not self.rows:
            raise StageError("no pair is left to train on. Fix: raise repeats, or add preference data")

    def place(self, i: int) -> tuple[int, int]:
        """The set and the row of sample i, i >= 0. IndexError for a negative index."""
        if i < 0:
            raise IndexError(f"sample {i}")
        epoch, place = divmod(i, self.rows)
        place = permutation(self.rows, self._seed, epoch, "preference rows")(place)
        made, sets = self._latest
        if made != epoch:
            sets = self._rows_in(epoch)
            self._latest = (epoch, sets)  # assigned in one step, since several threads may read it
        for number, rows in enumerate(sets):
            if place < rows.size:
                return number, int(rows[place])
            place -= rows.size
        raise AssertionError("every epoch has as many rows")

    def __getitem__(self, i: int) -> PreferenceSample:
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
