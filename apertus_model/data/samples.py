"""Training and validation samples: windows over token files, as a function of the sample index.

Invariants:
- Sample i of (recipe, token files, sequence length, packing, seed, Goldfish parameters) is the same bytes in every process, on any number
  of ranks, before and after a restart. There is no state, and no file stays open.
- Opening reads no token file: the sizes of the shards are in the manifest, and a shard is opened when a sample first lies in it.
- The training split of a source is one stream of tokens, its shards one after the other. Window w covers tokens [w L, w L + L]: L + 1
  tokens, the last of which is also the first of the next window, so that every token but the first is a label once per epoch. With best-fit
  packing a window is a packed row instead (`apertus_model.data.packed`).
- Positions restart at 0 behind each end-of-document token, and at the start of a window.
- Where the input is the end-of-document token, the label is IGNORED: predicting `</s>` is trained, predicting the `<s>` of an unrelated
  document is not (Megatron's `--eod-mask-loss`). The Goldfish hash sees the true ids.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from apertus_model.data.corpora import CorpusShard
from apertus_model.data.goldfish import goldfish_mask
from apertus_model.data.megatron import TokenFile, TokenFileError
from apertus_model.data.order import Draw, MixtureOrder
from infra.store.inputs import SourceError
from specs.stages.training import Goldfish

IGNORED = -100
TokenPath = Path | str | tuple[Path, Path]
"""A token file: the common path of `.bin` and `.idx` without suffix, or the two paths."""
TokenPaths = TokenPath | Sequence[TokenPath | CorpusShard]


class Sample(NamedTuple):
    """One sequence of `L = sequence_length` tokens.

    input: (L,), int64; labels: (L,), int64, IGNORED where nothing is trained; positions: (L,), int64, from 0 in each document;
    source: index of the source in the recipe.
    """

    input: NDArray[np.int64]
    labels: NDArray[np.int64]
    positions: NDArray[np.int64]
    source: int


class TokenStream:
    """The token files of one split of one source, one after the other. Shards of an artifact are opened when they are first read.

    Raises ValueError without files, and what TokenFile raises.
    """

    def __init__(self, paths: TokenPaths, vocab_size: int | None = None) -> None:
        several = not isinstance(paths, (str, Path, tuple))
        given: Sequence[Any] = paths if several else [paths]  # type: ignore[assignment]  # told apart here
        self._shards = [shard if isinstance(shard, CorpusShard) else _Files(shard) for shard in given]
        if not self._shards:
            raise ValueError("a token stream needs at least one token file")
        self._vocab_size = vocab_size
        sizes = [shard.tokens if isinstance(shard, CorpusShard) else _checked(shard).size for shard in self._shards]
        self._starts = np.cumsum([0, *sizes])

    def __len__(self) -> int:
        """Tokens of all files together."""
        return int(self._starts[-1])

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens [start, stop): (stop - start,), int64. Raises IndexError beyond the end."""
        if stop > len(self):
            raise IndexError(f"tokens {start} to {stop} were asked for; the stream has {len(self)}")
        tokens = np.empty(stop - start, dtype=np.int64)
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        done = 0
        while done < tokens.size:
            offset = int(self._starts[shard])
            piece = self._shard(shard).read(start + done - offset, stop - offset, self._vocab_size)
            tokens[done : done + piece.size] = piece
            done += piece.size
            shard += 1
        return tokens

    def _shard(self, number: int) -> _Shard:
        """A shard, checked when it is first met. TokenFileError when it does not hold as many tokens as the manifest of its corpus says."""
        shard = _checked(self._shards[number])
        size = int(self._starts[number + 1] - self._starts[number])
        if shard.size != size:
            raise TokenFileError(
                f"{shard.path} holds {shard.size} tokens of type {shard.dtype}; by the manifest of its corpus it has {size}"
            )
        return shard

    def windows(self, sequence_length: int) -> int:
        """How many whole windows of `sequence_length` labels there are."""
        return max(0, (len(self) - 1) // sequence_length)


class _Files:
    """A token file outside of an artifact."""

    def __init__(self, path: TokenPath) -> None:
        self._path = path

    def files(self) -> tuple[Path | str, Path | None]:
        return self._path if isinstance(self._path, tuple) else (self._path, None)


class _Shard(NamedTuple):
    """A token file that was checked. Nothing of it stays open: a map or a descriptor for each of thousands would be more than a process may
    have, and to open a file costs less than what is done with a sequence of it."""

    path: Path
    dtype: np.dtype
    size: int

    def read(self, start: int, stop: int, vocab_size: int | None) -> NDArray[np.integer]:
        """Tokens [start, stop), fewer at the end of the file. TokenFileError for an id outside of the vocabulary."""
        count = min(stop, self.size) - start
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            data = os.pread(descriptor, count * self.dtype.itemsize, start * self.dtype.itemsize)
        finally:
            os.close(descriptor)
        tokens = np.frombuffer(data[: len(data) // self.dtype.itemsize * self.dtype.itemsize], dtype=self.dtype)
        if tokens.size != count:
            raise TokenFileError(f"{self.path} ended at token {start + tokens.size}; it had {self.size} when it was opened")
        if vocab_size is not None and count:
            worst = lowest if (lowest := tokens.min()) < 0 else tokens.max()
            if not 0 <= worst < vocab_size:
                raise TokenFileError(
                    f"{self.path} holds token id {worst} between tokens {start} and {stop}; the vocabulary has {vocab_size}"
                )
        return tokens


@functools.lru_cache(maxsize=2**16)
def _checked(shard: CorpusShard | _Files) -> _Shard:
    file = TokenFile(*shard.files())
    return _Shard(file.path, file.dtype, file.tokens.size)


class Sequences(Protocol):
    """The training sequences of one source."""

    def __len__(self) -> int: ...

    def sample(self, index: int, source: int) -> Sample:
        """Sequence `index` as a sample of source number `source`."""


class Windows:
    """Documents one after the other, cut into windows: concatenate and split."""

    def __init__(self, stream: TokenStream, sequence_length: int, eos_id: int, goldfish: Goldfish | None) -> None:
        self._stream = stream
        self._sequence_length = sequence_length
        self._eos_id = eos_id
        self._goldfish = goldfish

    def __len__(self) -> int:
        return self._stream.windows(self._sequence_length)

    def sample(self, index: int, source: int) -> Sample:
        start = index * self._sequence_length
        return _sample(self._stream.read(start, start + self._sequence_length + 1), source, self._eos_id, self._goldfish)


class MixtureSamples:
    """The endless sample sequence of a mixture: `samples[i]` for i = 0, 1, ...

    Built by `open`. Picklable and safe to share between forked workers: reading has no state.
    """

    def __init__(self, sources: Sequence[Sequences], order: MixtureOrder) -> None:
        self._sources = list(sources)
        self.order = order

    @classmethod
    def open(
        cls,
        recipe: Mapping[str, Any],
        bins: Sequence[TokenPaths],
        *,
        sequence_length: int,
        seed: int | None = None,
        goldfish: Goldfish | None = None,
        packed: Sequence[Mapping[str, Path]] | None = None,
        excluded: Sequence[tuple[Mapping[str, Any], int]] = (),
    ) -> MixtureSamples:
        """Opens the training split of a mixture.

        Args:
            recipe: recipe.json of a mixture (`apertus_model/stages/mixture.py`).
            bins: for each source of the recipe, in its order, the token file of its training split, or the list of its shards
                (`apertus_model.data.corpora.split_shards` gives it).
            sequence_length: labels per sample.
            seed: of the order; the recipe's by default.
            goldfish: parameters of the Goldfish loss; None masks nothing.
            packed: with best-fit packing, the tables of each source (`apertus_model.data.packed.packed_tables`).
            excluded: recipes of the same seed, and how many samples of each were drawn before: their windows come last.

        Raises:
            ValueError: when the numbers of sources, or the seeds, differ.
            SourceError: when a source is too short for a single window.
            TokenFileError: when a token file is damaged.
        """
        from apertus_model.data.packed import PackedRows

        sources = recipe["sources"]
        for what, given in (("token files", bins), ("packed rows", packed)):
            if given is not None and len(given) != len(sources):
                raise ValueError(f"the recipe has {len(sources)} sources, but {what} of {len(given)} were given")
        streams = [TokenStream(paths, recipe["vocab_size"]) for paths in bins]
        eos_id, sequences = recipe["eos_id"], list[Sequences]()
        for index, stream in enumerate(streams):
            if packed is not None:
                sequences.append(PackedRows(stream, packed[index], sequence_length, eos_id, goldfish))
            else:
                sequences.append(Windows(stream, sequence_length, eos_id, goldfish))
            if not len(sequences[-1]):
                raise SourceError(
                    f"source {index} (corpus {sources[index]['fingerprint']}) has {len(stream)} training tokens; a sample of sequence "
                    f"length {sequence_length} takes {sequence_length + 1}. Fix: add documents to it, leave it out or shorten the sequences"
                )
        seed = recipe["seed"] if seed is None else seed
        before = drawn_before(excluded, seed)
        order = MixtureOrder(
            [Fraction(source["weight"]) for source in sources],
            [len(source) for source in sequences],
            seed,
            keys=[source["fingerprint"] for source in sources],
            starts=[before.get(source["fingerprint"], 0) for source in sources],
        )
        return cls(sequences, order)

    def __getitem__(self, i: int) -> Sample:
        """Sample i, i >= 0. Raises IndexError for a negative index."""
        draw = self.order[i]
        return self._sources[draw.source].sample(draw.window, draw.source)

    def source_of(self, i: int) -> tuple[int, int]:
        """(index of the source of sample i, how many of its samples come before this one in its own endless sequence)."""
        draw = self.draw(i)
        return draw.source, draw.draw

    def draw(self, i: int) -> Draw:
        """Everything about where sample i comes from."""
        return self.order[i]

    def epochs(self, n: int) -> list[float]:
        """Passes over each source in the first n samples."""
        return [drawn / windows for drawn, windows in zip(self.order.drawn(n), self.order.windows, strict=True)]


def drawn_before(excluded: Sequence[tuple[Mapping[str, Any], int]], seed: int) -> dict[str, int]:
    """Draws of each corpus, by fingerprint, in the first samples of some recipes; an upper bound of its draws where they overlap.

    Raises ValueError for a recipe of another seed, whose windows come in another order."""
    drawn: dict[str, int] = {}
    for recipe, samples in excluded:
        if recipe["seed"] != seed:
            raise ValueError(f"what a mixture of seed {recipe['seed']} has drawn is no beginning of the order of seed {seed}")
        weights = [Fraction(source["weight"]) for source in recipe["sources"]]
        counts = MixtureOrder(weights, [1] * len(weights), seed).drawn(samples)
        for source, count in zip(recipe["sources"], counts, strict=True):
            drawn[source["fingerprint"]] = drawn.get(source["fingerprint"], 0) + count
    return drawn


class ValidationSamples(Sequence[Sample]):
    """Held-out sequences, source after source, in order, without Goldfish.

    Every held-out token but the first of a source is a label exactly once (ends of documents as in training): the last window of a source
    is filled up with end-of-document tokens whose labels are IGNORED.
    """

    def __init__(self, streams: Sequence[TokenStream], sequence_length: int, eos_id: int) -> None:
        self._streams = streams
        self._sequence_length = sequence_length
        self._eos_id = eos_id
        counts = [max(0, -(-(len(stream) - 1) // sequence_length)) for stream in streams]
        self._starts = np.cumsum([0, *counts])

    def __len__(self) -> int:
        return int(self._starts[-1])

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(f"validation sample {index} of {len(self)}")
        source = int(np.searchsorted(self._starts, index, side="right")) - 1
        stream, length = self._streams[source], self._sequence_length
        start = (index - int(self._starts[source])) * length
        tokens = stream.read(start, min(start + length + 1, len(stream)))
        known = tokens.size - 1
        sample = _sample(np.pad(tokens, (0, length - known), constant_values=self._eos_id), source, self._eos_id, None)
        sample.labels[known:] = IGNORED
        return sample

    def of_source(self, source: int) -> range:
        """Indices of the samples of one source."""
        return range(int(self._starts[source]), int(self._starts[source + 1]))


def validation_samples(recipe: dict[str, Any], bins: Sequence[TokenPaths], *, sequence_length: int) -> ValidationSamples:
    """Opens the held-out split of a mixture; arguments and errors as in `MixtureSamples.open`."""
    if len(bins) != len(recipe["sources"]):
        raise ValueError(f"the recipe has {len(recipe['sources'])} sources, but token files of {len(bins)} were given")
    return ValidationSamples([TokenStream(paths, recipe["vocab_size"]) for paths in bins], sequence_length, recipe["eos_id"])


def _sample(tokens: NDArray[np.int64], source: int, eos_id: int, goldfish: Goldfish | None) -> Sample:
    """(L + 1,) tokens -> a sample of L."""
    inputs, labels = tokens[:-1], tokens[1:].copy()
    ends = inputs == eos_id
    positions = positions_within_documents(ends)
    if goldfish is not None:
        labels[goldfish_mask(tokens[1:], goldfish.k, goldfish.h, positions if goldfish.within_documents else None)] = IGNORED
    labels[ends] = IGNORED
    return Sample(inputs.copy(), labels, positions, source)


def positions_within_documents(ends: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Distance of each token from the start of its document: (L,), bool (token is an end of document) -> (L,), int64.

    Example: [F F T F T T F] -> [0 1 2 0 1 0 0].
    """
    index = np.arange(ends.size, dtype=np.int64)
    starts = np.zeros_like(index)
    starts[1:] = np.where(ends[:-1], index[1:], 0)
    return index - np.maximum.accumulate(starts)
