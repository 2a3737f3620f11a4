"""The samples of a mixture in batches with equally many samples of each source.

Invariant: in every batch the samples of source 0 come first, then those of source 1, and so on; sample i is a
pure function of i, and the samples of a source come in the same order as in any mixture with the same seed.
"""

from __future__ import annotations

from apertus_model.data.samples import MixtureSamples
from apertus_model.data.stream import Sample


class EqualSamples:
    """The sequence of samples: `samples[i]` for i = 0, 1, ...

    Args:
        samples: of the mixture, whose own shares are not used.
        batch: number of samples of a batch, a multiple of the number of sources.
    """

    def __init__(self, samples: MixtureSamples, batch: int) -> None:
        self._samples = samples
        self._batch = batch
        self._each = batch // len(samples.order.windows)
        self.remote = samples.remote

    def __getitem__(self, i: int) -> Sample:
        """Sample i, i >= 0."""
        batch, place = divmod(i, self._batch)
        source, number = divmod(place, self._each)
        return self._samples.of_source(source, batch * self._each + number)

    def epochs(self, n: int) -> list[float]:
        """Passes over each source in the first n samples."""
        batches, rest = divmod(n, self._batch)
        return [
            (batches * self._each + min(max(0, rest - source * self._each), self._each)) / windows
            for source, windows in enumerate(self._samples.order.windows)
        ]
