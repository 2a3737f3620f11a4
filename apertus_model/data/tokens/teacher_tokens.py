"""A teacher's predictions after each token of samples: the k most likely words, and the others together.

An artifact has files of `samples_per_file` samples; the last file may have fewer. A sample of L tokens is,
little endian and without gaps,

    words   (L, k) int32: ids, the most likely first
    log_p   (L, k + 1) float32: ln p of these words, and of all others together

Invariant: sample i of a `TaughtSamples` has the input, labels and positions of sample i of the mixture.
"""

from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from infra.store import Artifact, StoreError
from infra.store.reading.ranges import BlockCache, StoredFile


class Predicted(NamedTuple):
    """A teacher's predictions after each token of a sample."""

    words: NDArray[np.int32]  # (L, k)
    log_p: NDArray[np.float32]  # (L, k + 1)

    def to_bytes(self) -> bytes:
        """The stored form."""
        return self.words.astype("<i4").tobytes() + self.log_p.astype("<f4").tobytes()


class TaughtSample(NamedTuple):
    """A sample with the teacher's predictions; arrays are (L,), (L, k) and (L, k + 1)."""

    input: NDArray[np.int64]
    labels: NDArray[np.int64]
    positions: NDArray[np.int64]
    teacher_words: NDArray[np.int32]
    teacher_log_p: NDArray[np.float32]


class StoredPredictions:
    """The samples of an artifact of kind `teacher_tokens`, by their number in the mixture."""

    def __init__(self, artifact: Artifact, cache: BlockCache | None) -> None:
        facts = artifact.manifest.facts
        self.first, self.number = int(facts["first_sample"]), int(facts["samples"])
        self._length, self._k = int(facts["sequence_length"]), int(facts["top_k"])
        self._per_file = int(facts["samples_per_file"])
        self._files = [StoredFile(artifact, name, cache) for name in facts["files"]]
        self._name = artifact.path
        self.remote = any(file.remote for file in self._files)

    def __getitem__(self, sample: int) -> Predicted:
        """The predictions for a sample. StoreError if the sample is not stored."""
        index = sample - self.first
        if not 0 <= index < self.number:
            stored = f"{self.first} to {self.first + self.number - 1}"
            raise StoreError(f"{self._name} has the samples {stored}, not {sample}; run its stage again")
        length, k = self._length, self._k
        size = 4 * length * (2 * k + 1)
        file, place = divmod(index, self._per_file)
        data = self._files[file].read(place * size, (place + 1) * size)
        words, log_p = data[: 4 * length * k], data[4 * length * k :]
        return Predicted(
            np.frombuffer(words, "<i4").reshape(length, k), np.frombuffer(log_p, "<f4").reshape(length, k + 1)
        )


class _Samples(Protocol):
    def __getitem__(self, index: int, /) -> Any: ...
    def epochs(self, n: int, /) -> list[float]: ...


class TaughtSamples:
    """The samples of a mixture with the teacher's predictions."""

    def __init__(self, samples: _Samples, stored: StoredPredictions) -> None:
        self._samples, self._stored = samples, stored
        self.remote = stored.remote or getattr(samples, "remote", False)

    def __getitem__(self, index: int) -> TaughtSample:
        sample, predicted = self._samples[index], self._stored[index]
        return TaughtSample(sample.input, sample.labels, sample.positions, *predicted)

    def epochs(self, n: int) -> list[float]:
        """Passes over each source in the first n samples, as the mixture counts them."""
        return self._samples.epochs(n)
