"""Training and held-out samples of conversations: token sequences as a function of the sample index.

Invariants:
- For given shards, repeats, layout, seed and treatment of long conversations, sample i has the same bytes in
  every process and after every restart. Which conversations of an epoch share a row depends on lengths alone;
  the seed decides the order of rows.
- How often a kept conversation is in an epoch follows from its source's repeats (`order/permutation.py`).
- Conversations of a row do not see each other: positions restart, and labels are next tokens of the same one.
- Outputs of tools, what the data exclude from training, and padding have weight 0 in the loss and are never
  counted, at any prompt weight.

A step's loss is sum_k (sum_i w_ik l_i) / N_k over its labels i, where l_i is the loss of a label and N_k the
sum of the counts of the step's conversations in column k. With p_i = 1 for a label of a prompt, a_i = 1 for a
label of an answer, and P, A the numbers of prompt and answer labels in a conversation, the columns are

    average        length_normalised   weights w_i                      counts N
    tokens         no                  a_i + prompt_weight p_i          sum of the weights
    tokens         yes                 a_i; prompt_weight p_i           A; P
    conversations  no                  (a_i + prompt_weight p_i) / sum  1
    conversations  yes                 a_i / A + prompt_weight p_i / P  1

which are the losses of `PLWTrainer` and `LengthNormalizedPLWTrainer` of swiss-ai/posttraining
(src/post_training/trainers/sft.py), the last two with `sequence_level_loss`.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from apertus_model.chat.encoder import PROMPT, TRAINED, UNTRAINED
from apertus_model.data.conversations.stored import ConversationShards
from apertus_model.data.order.permutation import cached_permutation, times_seen
from apertus_model.data.tokens.packing import fill_row, pack
from infra.store.inputs import SourceError
from specs.settings import AnyPacking
from specs.stages.mixture import exact
from specs.stages.sft import SftLoss

Longer = Literal["drop", "truncate"]
TABLES = 2
"""The number of epochs whose rows are held in memory, at 16 bytes per conversation."""


class PackedSample(NamedTuple):
    """One row of `L = sequence_length` tokens."""

    input: NDArray[np.int64]  # (L,)
    labels: NDArray[np.int64]  # (L,), IGNORE_INDEX where nothing is trained
    positions: NDArray[np.int64]  # (L,), from 0 in each conversation and in the padding
    # One per label: (L,), or None if all are 1 except at IGNORE_INDEX; (L, columns) if there are counts.
    weights: NDArray[np.floating] | None
    counts: NDArray[np.float64] | None = None  # (columns,), as in `chat_weights`


class _Layout(NamedTuple):
    sequence_length: int  # tokens of the row
    loss: SftLoss
    pad_id: int  # fills the end of the row


class _Epoch(NamedTuple):
    items: NDArray[np.int64]  # (conversations, 2): source and number in its split, row by row
    starts: NDArray[np.int64]  # (rows + 1,): the items of row r begin at `starts[r]`

    @property
    def rows(self) -> int:
        return len(self.starts) - 1


class ConversationSamples:
    """The endless sample sequence of the conversations of some sources: `samples[i]` for i = 0, 1, ...
    Picklable, without state. `shards`: the training split of each source; `repeats`: how often an epoch shows
    it; `seed`: decides the order of rows, and which part of a source is seen once more; `packing`: whether a
    row has several conversations (`best-fit`) or one (`none`); `longer`: whether conversations that do not
    fit into a row are dropped or cut at its end. SourceError when no conversation fits, or the repeats round
    to none.

    `dropped`: the number of conversations that are too long, or have nothing to train within a row; each
    counts once."""

    def __init__(
        self,
        shards: Sequence[ConversationShards],
        repeats: Sequence[int | float],
        *,
        sequence_length: int,
        seed: int,
        loss: SftLoss,
        packing: AnyPacking,
        longer: Longer,
        pad_id: int,
    ) -> None:
        assert len(shards) == len(repeats) > 0
        self._shards = list(shards)
        self._kept = [_kept(source, sequence_length, longer) for source in shards]
        self._repeats = [exact(number) for number in repeats]
        self._seed = seed
        self._packing = packing
        self._layout = _Layout(sequence_length, loss, pad_id)
        self._firsts = [0]  # the first sample of each epoch, as far as known
        self._tables: dict[int, _Epoch] = {}
        kept = sum(own.size for own in self._kept)
        self.dropped = sum(map(len, shards)) - kept
        if not kept:
            raise SourceError(
                f"none of the {self.dropped} conversations fits into a sequence of {sequence_length}"
                " tokens. Fix: raise sequence_length"
            )
        if not self.rows:
            raise SourceError(
                f"repeats {', '.join(map(str, repeats))} of {', '.join(str(own.size) for own in self._kept)}"
                " conversations round to none. Fix: raise the numbers, or add conversations"
            )

    @property
    def rows(self) -> int:
        """The number of rows of the first epoch, and of every epoch when all repeats are whole numbers."""
        return self._epoch(0).rows

    def __getitem__(self, i: int) -> PackedSample:
        """Sample i, i >= 0. Raises IndexError for a negative index."""
        chosen = [(self._shards[source], index) for source, index in self.conversations(i)]
        return _sample(chosen, self._layout)

    def conversations(self, i: int) -> list[tuple[int, int]]:
        """(source, number in its split) of each conversation of sample i. IndexError like `samples[i]`."""
        if i < 0:
            raise IndexError(f"sample {i}: samples are counted from 0")
        epoch, place = self._find(i)
        items, starts = table = self._epoch(epoch)
        row = cached_permutation(table.rows, self._seed, "conversations", epoch)(place)
        return [(source, index) for source, index in items[starts[row] : starts[row + 1]].tolist()]

    def epochs(self, n: int) -> list[float]:
        """The number of passes over each source after n samples (exact after whole epochs of rows)."""
        epoch, place = self._find(n)
        done = epoch + place / self._epoch(epoch).rows
        return [float(times) * done for times in self._repeats]

    def _find(self, i: int) -> tuple[int, int]:
        """The epoch of sample i, and its place in that epoch. When a repeat is not a whole number, epochs are
        made in turn until the sample is reached, each in about a second per million conversations."""
        if self._same_rows:
            return divmod(i, self.rows)
        firsts = self._firsts
        while firsts[-1] <= i:
            firsts = [*firsts, firsts[-1] + self._epoch(len(firsts) - 1).rows]
        self._firsts = firsts  # in one assignment, since several threads may call this
        epoch = bisect_right(firsts, i) - 1
        return epoch, i - firsts[epoch]

    @property
    def _same_rows(self) -> bool:
        return all(times.denominator == 1 for times in self._repeats)

    def _epoch(self, number: int) -> _Epoch:
        number = 0 if self._same_rows else number
        tables = self._tables
        if number not in tables:
            latest = dict(list(tables.items())[1 - TABLES :])
            self._tables = tables = {**latest, number: self._rows_of(number)}
        return tables[number]

    def _rows_of(self, epoch: int) -> _Epoch:
        chosen = [self._items(source, epoch) for source in range(len(self._shards))]
        sources = np.repeat(np.arange(len(chosen)), [indices.size for indices in chosen])
        items = np.stack([sources, np.concatenate(chosen)], axis=1)
        if self._packing == "none" or not len(items):
            return _Epoch(items, np.arange(len(items) + 1))
        length = self._layout.sequence_length
        sizes = [shards.lengths[indices] for shards, indices in zip(self._shards, chosen, strict=True)]
        rows = pack(np.minimum(np.concatenate(sizes), length), length)
        return _Epoch(items[np.concatenate(rows)], np.cumsum([0, *(len(row) for row in rows)]))

    def _items(self, source: int, epoch: int) -> NDArray[np.int64]:
        """The conversations of a source in an epoch; the repetitions of one are next to each other."""
        kept, times = self._kept[source], self._repeats[source]
        return np.repeat(kept, times_seen(kept.size, times, seed=self._seed, source=source, epoch=epoch))


def heldout(
    shards: Sequence[ConversationShards], *, sequence_length: int, longer: Longer, pad_id: int
) -> list[PackedSample]:
    """The rows of the given (held-out) splits: each conversation once, in stored order, source after source,
    with labels for answers only. The arguments are those of `ConversationSamples`."""
    layout = _Layout(sequence_length, SftLoss(), pad_id)
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
    """The indices of the conversations to use. A truncated one must keep a token to train on."""
    fits = source.lengths <= sequence_length
    if longer == "truncate":
        for index in np.flatnonzero(~fits).tolist():
            fits[index] = TRAINED in source.mask(index)[:sequence_length]
    return np.flatnonzero(fits)


def _sample(conversations: Sequence[tuple[ConversationShards, int]], layout: _Layout) -> PackedSample:
    length, loss = layout.sequence_length, layout.loss
    pieces = [(shards.tokens(index)[:length], shards.mask(index)[:length]) for shards, index in conversations]
    # The `inverse_rl` term reads the logits of every position that has a next token.
    trained = [
        (mask == TRAINED) | ((mask != UNTRAINED) & (loss.prompt_weight > 0)) | (loss.inverse_rl is not None)
        for _, mask in pieces
    ]
    sequences = [(tokens, kept) for (tokens, _), kept in zip(pieces, trained, strict=True)]
    row = fill_row(sequences, length, layout.pad_id)
    if loss.objective == "cross-entropy":
        return PackedSample(row.input, row.labels, row.positions, None)
    of_conversations = [label_weights(mask, loss) for _, mask in pieces]
    weights = np.zeros((length, of_conversations[0].weights.shape[1]))
    for start, labels in zip(row.starts, of_conversations, strict=True):
        weights[start : start + len(labels.weights)] = labels.weights
    if loss.objective == "weighted-cross-entropy":
        return PackedSample(row.input, row.labels, row.positions, weights[:, 0].astype(np.float32))
    counts = np.sum([labels.counts for labels in of_conversations], axis=0)
    return PackedSample(row.input, row.labels, row.positions, weights, counts)


class LabelWeights(NamedTuple):
    """The weights and counts of the labels of one conversation."""

    weights: NDArray[np.float64]  # (labels, columns)
    counts: NDArray[np.float64]  # (columns,)


def label_weights(mask: NDArray[np.uint8], loss: SftLoss) -> LabelWeights:
    """The weights and counts of the labels, which are all tokens except the first. `mask`: (tokens,), kinds
    of the tokens, as in `ConversationShards.mask`."""
    answers, prompts = ((mask[1:] == kind).astype(np.float64) for kind in (TRAINED, PROMPT))
    if loss.average == "tokens":
        columns = [answers, loss.prompt_weight * prompts]
        if loss.length_normalised:
            return LabelWeights(np.stack(columns, axis=1), np.array([answers.sum(), prompts.sum()]))
        weights = columns[0] + columns[1]
        return LabelWeights(weights[:, None], weights.sum(keepdims=True))
    if loss.length_normalised:
        weights = _mean(answers) + loss.prompt_weight * _mean(prompts)
    else:
        weights = _mean(answers + loss.prompt_weight * prompts)
    return LabelWeights(weights[:, None], np.ones(1))


def _mean(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The values divided by their sum, or unchanged when the sum is 0."""
    total = values.sum()
    return values / total if total else values
