"""Training and validation samples: windows over token files, as a function of the sample index.

Invariants:
- Sample i of (recipe, token files, sequence length, packing, seed, Goldfish parameters) is the same bytes in
  every process, on any number of ranks, before and after a restart. The only state is a few open files.
- Opening reads no token file: a shard is opened when a sample in it is first read.
- The training split of a source is one stream of tokens, its shards one after the other. Window w covers
  tokens [w L, w L + L]: L + 1 tokens, the last of which is also the first of the next window, so that every
  token but the first is a label once per epoch. With best-fit packing a window is a packed row.
- Positions restart at 0 after each end-of-document token, and at the start of a window.
- Where the input is the end-of-document token, the label is IGNORE_INDEX: predicting `</s>` is trained,
  predicting the `<s>` of an unrelated document is not (Megatron's `--eod-mask-loss`). The Goldfish hash sees
  the true ids.
- In `EqualSamples`, a batch has the samples of source after source, each in the order of any mixture of the
  seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from apertus_model.data.order.mixture import MixtureOrder
from apertus_model.data.order.mixture_recipe import MixtureRecipe
from apertus_model.data.tokens.best_fit import PackedRows
from apertus_model.data.tokens.goldfish import goldfish_mask
from apertus_model.data.tokens.stream import IGNORE_INDEX, Sample, TokenShard, TokenStream
from infra.store.inputs import SourceError
from specs.settings import Goldfish

MANY_DOCUMENTS = 16
"""Up to this number of documents in a window, handling them one by one is faster than all at once."""


class Windows:
    """Documents one after the other, cut into windows: concatenate and split."""

    def __init__(self, stream: TokenStream, length: int, eos_id: int, goldfish: Goldfish | None) -> None:
        self._stream, self._length, self._eos_id, self._goldfish = stream, length, eos_id, goldfish

    def __len__(self) -> int:
        return self._stream.windows(self._length)

    def sample(self, index: int, source: int) -> Sample:
        start = index * self._length
        tokens = self._stream.read(start, start + self._length + 1)
        return _sample(tokens, source, self._eos_id, self._goldfish)


class MixtureSamples:
    """The endless sample sequence of a mixture: `samples[i]` for i = 0, 1, ... Picklable, and safe to share
    between threads: reading has no state. `remote`: whether reading may wait for a network."""

    def __init__(
        self, sources: Sequence[Windows | PackedRows], order: MixtureOrder, *, remote: bool = False
    ) -> None:
        self._sources = list(sources)
        self.order = order
        self.remote = remote

    @classmethod
    def open(
        cls,
        recipe: MixtureRecipe,
        shards: Sequence[Sequence[TokenShard]],
        *,
        sequence_length: int,
        seed: int | None = None,
        goldfish: Goldfish | None = None,
        packed: Sequence[Mapping[str, Path]] | None = None,
        excluded: Sequence[tuple[MixtureRecipe, int]] = (),
    ) -> MixtureSamples:
        """Opens the training split of a mixture. `shards`: of the training split of each source of the
        recipe (`split_shards`); `seed`: of the order, the recipe's by
        default; `packed`: with best-fit packing, the tables of each source (`packed_tables`); `excluded`:
        recipes with the same seed, each with its number of samples already drawn, whose windows come last.
        ValueError when seeds differ, SourceError for a source that is too short for a window, TokenFileError
        for a damaged token file."""
        sources = recipe.sources
        assert len(shards) == len(sources) == len(shards if packed is None else packed)
        streams = list(map(TokenStream, shards))
        eos_id, sequences = recipe.eos_id, list[Windows | PackedRows]()
        for index, stream in enumerate(streams):
            if packed is not None:
                sequences.append(PackedRows(stream, packed[index], sequence_length, eos_id, goldfish))
            else:
                sequences.append(Windows(stream, sequence_length, eos_id, goldfish))
            if not len(sequences[-1]):
                raise SourceError(
                    f"source {index} (corpus {sources[index].fingerprint}) has {len(stream)} training"
                    f" tokens; a sample of sequence length {sequence_length} takes {sequence_length + 1}."
                    " Fix: add documents to it, leave it out or shorten the sequences"
                )
        seed = recipe.seed if seed is None else seed
        before = drawn_before(excluded, seed)
        keys = [source.fingerprint for source in sources]
        starts = [before.get(key, 0) for key in keys]
        order = MixtureOrder(recipe.weights, list(map(len, sequences)), seed, keys=keys, starts=starts)
        return cls(sequences, order, remote=any(stream.remote for stream in streams))

    def __getitem__(self, i: int) -> Sample:
        """Sample i, i >= 0. Raises IndexError for a negative index."""
        draw = self.order[i]
        return self._sources[draw.source].sample(draw.window, draw.source)

    def of_source(self, source: int, draw: int) -> Sample:
        """The sample of draw number `draw` of a source, counted from 0."""
        return self._sources[source].sample(self.order.draw(source, draw).window, source)

    def epochs(self, n: int) -> list[float]:
        """Passes over each source in the first n samples."""
        counts = zip(self.order.drawn(n), self.order.windows, strict=True)
        return [drawn / windows for drawn, windows in counts]


def drawn_before(excluded: Sequence[tuple[MixtureRecipe, int]], seed: int) -> dict[str, int]:
    """The number of windows of each corpus, by fingerprint, that the excluded samples have drawn; an upper
    bound where their recipes draw the same windows. ValueError for a recipe with another seed."""
    drawn: dict[str, int] = {}
    for recipe, samples in excluded:
        if recipe.seed != seed:
            other = f"samples of a mixture of seed {recipe.seed}"
            raise ValueError(f"{other} cannot be excluded from one of seed {seed}")
        counts = MixtureOrder(recipe.weights, [1] * len(recipe.sources), seed).drawn(samples)
        for source, count in zip(recipe.sources, counts, strict=True):
            drawn[source.fingerprint] = drawn.get(source.fingerprint, 0) + count
    return drawn


class ValidationSamples:
    """Held-out sequences, source after source, in order, without Goldfish; arguments and errors as in
    `MixtureSamples.open`. Every token but the first of a source is a label exactly once (ends of documents as
    in training): the last window is filled up with end-of-document tokens without labels."""

    def __init__(self, shards: Sequence[Sequence[TokenShard]], *, eos_id: int, sequence_length: int) -> None:
        self._streams = list(map(TokenStream, shards))
        self._sequence_length = sequence_length
        self._eos_id = eos_id
        counts = [max(0, -(-(len(stream) - 1) // sequence_length)) for stream in self._streams]
        self._starts = np.cumsum([0, *counts])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"validation sample {index} of {len(self)}")
        source = int(np.searchsorted(self._starts, index, side="right")) - 1
        stream, length = self._streams[source], self._sequence_length
        start = (index - int(self._starts[source])) * length
        tokens = stream.read(start, min(start + length + 1, len(stream)))
        known = tokens.size - 1
        window = np.pad(tokens, (0, length - known), constant_values=self._eos_id)
        sample = _sample(window, source, self._eos_id, None)
        sample.labels[known:] = IGNORE_INDEX
        return sample

    def of_source(self, source: int) -> range:
        """Indices of the samples of one source."""
        return range(int(self._starts[source]), int(self._starts[source + 1]))


def _sample(tokens: NDArray[np.int64], source: int, eos_id: int, goldfish: Goldfish | None) -> Sample:
    """Makes a sample of L tokens from (L + 1,) tokens."""
    inputs, labels = tokens[:-1], tokens[1:].copy()
    ends = np.flatnonzero(inputs == eos_id)
    positions = positions_within_documents(ends, inputs.size)
    if goldfish is not None:
        within = positions if goldfish.within_documents else None
        labels[goldfish_mask(labels, goldfish.k, goldfish.h, within)] = IGNORE_INDEX
    labels[ends] = IGNORE_INDEX
    return Sample(inputs, labels, positions, source)


def positions_within_documents(ends: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Distance of each token from the start of its document, (length,), from the positions of the
    end-of-document tokens. Example: ends [2, 4, 5] of 7 tokens -> [0 1 2 0 1 0 0]."""
    positions = np.arange(length, dtype=np.int64)
    starts = np.append(ends, length - 1) + 1
    if starts.size <= MANY_DOCUMENTS:
        for start, end in pairwise(starts.tolist()):
            positions[start:end] -= start
        return positions
    return positions - np.repeat(np.append(0, starts[:-1]), np.diff(starts, prepend=0))


class EqualSamples:
    """The samples of a mixture, an equal number from each source in each `batch`, whatever the shares."""

    def __init__(self, samples: MixtureSamples, batch: int) -> None:
        self._samples = samples
        self._batch = batch
        self._each = batch // len(samples.order.windows)
        self.remote = samples.remote

    def __getitem__(self, i: int) -> Sample:
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
