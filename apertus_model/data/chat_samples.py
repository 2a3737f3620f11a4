"""Training and held-out samples of conversations: packed sequences, as a function of the sample index.

Invariants:
- Sample i of (shards, repeats, sequence length, seed, prompt weight, treatment of long conversations) is the
  same bytes in every process and after every restart. Which conversations share a row is a function of the
  lengths and the sequence length alone; the seed decides in which order the rows are seen.
- Every conversation that is not dropped is in exactly as many rows of an epoch as it is repeated.
- Conversations of a row do not see each other: positions restart at each, and a label is always the next
  token of the same one.
- Outputs of tools are never trained on, at any prompt weight.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from apertus_model.chat.encoder import TOOL_OUTPUT, TRAINED
from apertus_model.data.conversations import ConversationShards
from apertus_model.data.packing import fill_row, pack
from apertus_model.data.permutation import KeyedPermutation
from infra.store.inputs import SourceError

Longer = Literal["drop", "truncate"]

_permutation = functools.lru_cache(maxsize=16)(KeyedPermutation)


class PackedSample(NamedTuple):
    """One row of `L = sequence_length` tokens."""

    input: NDArray[np.int64]  # (L,)
    labels: NDArray[np.int64]  # (L,), IGNORE_INDEX where nothing is trained
    positions: NDArray[np.int64]  # (L,), from 0 in each conversation and in the padding
    weights: NDArray[np.float32] | None  # (L,), one per label; None: 1 for all but IGNORE_INDEX


class _Layout(NamedTuple):
    """How a row is filled."""

    sequence_length: int  # tokens of the row
    prompt_weight: float  # weight of labels that the assistant did not write
    pad_id: int  # fills the end of the row


class ConversationSamples:
    """The endless sample sequence of conversations: `samples[i]` for i = 0, 1, ... Built by `open`;
    picklable, without state.

    Attributes:
        rows: packed sequences of one epoch.
        dropped: conversations that are too long for a sequence, or have nothing to train within it; each
            counted once.
    """

    def __init__(
        self,
        shards: Sequence[ConversationShards],
        rows: list[NDArray[np.int64]],
        items: NDArray[np.int64],
        repeats: Sequence[int],
        dropped: int,
        seed: int,
        layout: _Layout,
    ) -> None:
        self._shards = list(shards)
        self._items = items[np.concatenate(rows)]
        self._starts = np.cumsum([0, *(len(row) for row in rows)])
        self._repeats = list(repeats)
        self._seed = seed
        self._layout = layout
        self.rows = len(rows)
        self.dropped = dropped

    @classmethod
    def open(
        cls,
        shards: Sequence[ConversationShards],
        repeats: Sequence[int],
        *,
        sequence_length: int,
        seed: int,
        prompt_weight: float,
        longer: Longer,
        pad_id: int,
    ) -> ConversationSamples:
        """Packs the conversations of some sources.

        Args:
            shards: the training split of each source.
            repeats: how often each source is seen per epoch.
            sequence_length: tokens per row.
            seed: of the order of the rows.
            prompt_weight: weight of the loss on tokens that are not the assistant's, relative to 1.
            longer: whether conversations that do not fit into a row are dropped or cut at its end.
            pad_id: fills up rows.

        Raises:
            ValueError: when the numbers of sources differ.
            SourceError: when nothing is left.
        """
        if len(shards) != len(repeats) or not shards:
            raise ValueError(
                f"a number of repeats per source is needed, not {len(repeats)} for {len(shards)} sources"
            )
        kept = [_kept(source, sequence_length, longer) for source in shards]
        items = np.concatenate(
            [
                np.stack([np.full(chosen.size * times, number), np.repeat(chosen, times)], axis=1)
                for number, (chosen, times) in enumerate(zip(kept, repeats, strict=True))
            ]
        )
        dropped = sum(len(source) - chosen.size for source, chosen in zip(shards, kept, strict=True))
        if not len(items):
            raise SourceError(
                f"none of the {dropped} conversations fits into a sequence of {sequence_length} tokens. Fix:"
                " a larger sequence_length"
            )
        lengths = np.concatenate(
            [
                np.repeat(source.lengths[chosen], n)
                for source, chosen, n in zip(shards, kept, repeats, strict=True)
            ]
        )
        rows = pack(np.minimum(lengths, sequence_length), sequence_length)
        return cls(
            shards, rows, items, repeats, dropped, seed, _Layout(sequence_length, prompt_weight, pad_id)
        )

    def __getitem__(self, i: int) -> PackedSample:
        """Sample i, i >= 0. Raises IndexError for a negative index."""
        return _sample(
            [(self._shards[source], index) for source, index in self.conversations(i)], self._layout
        )

    def conversations(self, i: int) -> list[tuple[int, int]]:
        """(source, number in its split) of the conversations of sample i, in order. Raises IndexError like
        `samples[i]`."""
        if i < 0:
            raise IndexError(f"sample {i}: samples are counted from 0")
        epoch, place = divmod(i, self.rows)
        row = _permutation(self.rows, self._seed, "conversations", epoch)(place)
        return [
            (source, index)
            for source, index in self._items[self._starts[row] : self._starts[row + 1]].tolist()
        ]

    def epochs(self, n: int) -> list[float]:
        """Passes over each source after n samples (exact after whole epochs of the rows)."""
        return [times * n / self.rows for times in self._repeats]


def heldout(
    shards: Sequence[ConversationShards],
    *,
    sequence_length: int,
    prompt_weight: float = 0.0,
    longer: Longer,
    pad_id: int,
) -> list[PackedSample]:
    """Rows of the conversations of the given (held-out) splits, in stored order, source after source, each
    once.

    Arguments as for `ConversationSamples.open`.
    """
    layout = _Layout(sequence_length, prompt_weight, pad_id)
    samples: list[PackedSample] = []
    row: list[tuple[ConversationShards, int]] = []
    filled = 0
    for source in shards:
        for index in _kept(source, sequence_length, longer).tolist():
            length = min(int(source.lengths[index]), sequence_length)
            if filled + length > sequence_length:
                samples.append(_sample(row, layout))
                row, filled = [], 0
            row.append((source, index))
            filled += length
    return samples + ([_sample(row, layout)] if row else [])


def _kept(source: ConversationShards, sequence_length: int, longer: Longer) -> NDArray[np.int64]:
    """Indices of the conversations to use. A cut one must keep something to train."""
    fits = source.lengths <= sequence_length
    if longer == "truncate":
        for index in np.flatnonzero(~fits).tolist():
            fits[index] = source.trained(index)[:sequence_length].any()
    return np.flatnonzero(fits)


def _sample(conversations: Sequence[tuple[ConversationShards, int]], layout: _Layout) -> PackedSample:
    length = layout.sequence_length
    pieces, weights = [], []
    for shards, index in conversations:
        tokens, mask = shards.tokens(index)[:length], shards.mask(index)[:length]
        weight = np.where(
            mask == TRAINED, 1.0, np.where(mask == TOOL_OUTPUT, 0.0, layout.prompt_weight)
        ).astype(np.float32)
        pieces.append((tokens, weight > 0))
        weights.append(weight)
    row = fill_row(pieces, length, layout.pad_id)
    if not layout.prompt_weight:
        return PackedSample(row.input, row.labels, row.positions, None)
    weight_of_label = np.zeros(length, dtype=np.float32)
    for start, weight in zip(row.starts, weights, strict=True):
        weight_of_label[start : start + weight.size - 1] = weight[1:]
    return PackedSample(row.input, row.labels, row.positions, weight_of_label)
