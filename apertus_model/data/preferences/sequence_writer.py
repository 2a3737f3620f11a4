"""Writes sequences of prompt and completion as arrays: tokens, and two lengths for each sequence.

Invariant: only a few numbers per sequence are held in memory.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np


class SequenceWriter:
    """A writer of the arrays `<prefix>{tokens,lengths,prompt_lengths}.npy` in `folder`."""

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
        raw = self._path("tokens.bin")
        with open(self._path("tokens.npy"), "wb") as target, open(raw, "rb") as source:
            header = {"descr": "<i4", "fortran_order": False, "shape": (sum(self.lengths),)}
            np.lib.format.write_array_header_1_0(target, header)
            shutil.copyfileobj(source, target)
        raw.unlink()
        for name, values in (("lengths", self.lengths), ("prompt_lengths", self._prompt_lengths)):
            np.save(self._path(f"{name}.npy"), np.array(values, np.int64), allow_pickle=False)
        return [f"{self._prefix}{name}.npy" for name in ("tokens", "lengths", "prompt_lengths")]
