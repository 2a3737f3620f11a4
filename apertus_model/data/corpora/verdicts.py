"""Decides the steps over the whole source, one range of text hashes at a time.

A member of a step is a document that reaches it. All members with the same text are in one range, so the
verdict on a text is reached there, with the label that `components` gave it, if the step compares signatures.

Invariants:
- Of the members with one text, the first by (hash of the columns that filters read, hash of the side table's
  row) stays. Documents that agree in all of these are the same in every output.
- Memory: 64 bytes for each member of the range; all copies of a text are in one range.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from apertus_model.data.corpora.duplicates import Edges
from apertus_model.data.corpora.records import column

MEMBERS = pa.schema(
    [
        pa.field("text", pa.uint64()),
        pa.field("columns", pa.uint64()),
        pa.field("row", pa.uint64()),
        pa.field("final", pa.uint64()),
        pa.field("span", pa.int32()),  # the span of tasks that the document is in
        pa.field("place", pa.int64()),  # of the document, among those of its span
        pa.field("tokens", pa.int32()),  # -1 where a later step drops the document in its task
    ]
)
MEMBER_BYTES = 64
VERDICTS = pa.schema([pa.field("place", pa.int64()), pa.field("value", pa.uint64())])
"""For a document that a step drops, `value` is the text that stays, or, below `MOST_PARTS`, the number of the
other part that has the document. For a copy, if no step removes copies, it is the copy's number, from 1."""
MOST_PARTS = 256


class Verdicts(NamedTuple):
    """The verdicts on the members of a range."""

    concerned: NDArray[np.int64]  # indices of members
    values: NDArray[np.uint64]  # the value of each of them, as in `VERDICTS`
    stay: NDArray[np.int64]  # indices of the members that are left


def drop_duplicates(members: pa.Table, labels: Edges, others: Sequence[NDArray[np.uint64]]) -> Verdicts:
    """Decides a step that drops duplicates. `labels`: of the texts that are similar to a smaller one, sorted
    by text; without any, only equal texts are compared. `others`: the sorted texts of each other corpus."""
    order, text, first = _by_text(members)
    values, gone = text.copy(), ~first
    for number in reversed(range(len(others))):
        there = _is_in(text, others[number])
        values[there], gone = np.uint64(number), gone | there
    similar = _is_in(text, labels.node)
    values[similar] = labels.other[np.searchsorted(labels.node, text[similar])]
    gone |= similar
    return Verdicts(order[gone], values[gone], order[~gone])


def number_copies(members: pa.Table) -> Verdicts:
    """Drops nothing, and numbers the documents with the same text."""
    order, _, first = _by_text(members)
    begins = np.flatnonzero(first)
    numbers = np.arange(len(order)) - begins[np.cumsum(first) - 1] if len(order) else np.empty(0, np.int64)
    return Verdicts(order[~first], numbers[~first].astype(np.uint64), order)


def _by_text(members: pa.Table) -> tuple[NDArray[np.int64], NDArray[np.uint64], NDArray[np.bool_]]:
    """The order by text, columns and row; the texts in it; and whether each is the first of its text."""
    order = np.lexsort([column(members, name) for name in ("row", "columns", "text")])
    text = column(members, "text")[order]
    first = np.ones(len(text), bool)
    first[1:] = text[1:] != text[:-1]
    return order, text, first


def _is_in(values: NDArray[np.uint64], among: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Whether each value is in a sorted array."""
    if not among.size:
        return np.zeros(len(values), bool)
    return among[np.minimum(np.searchsorted(among, values), len(among) - 1)] == values


class Tally(NamedTuple):
    """The documents that are left of one range, or of all ranges, by split."""

    documents: Sequence[int]  # training, held out
    tokens: Sequence[int]
    least: int  # the smallest final hash; 2^64 without documents


NOTHING = Tally((0, 0), (0, 0), 2**64)


def total(tallies: Iterable[Tally]) -> Tally:
    """The tally of several ranges together."""
    documents, tokens, least = zip(NOTHING, *tallies, strict=True)
    return Tally(_sums(documents), _sums(tokens), min(least))


def _sums(counts: Iterable[Sequence[int]]) -> list[int]:
    return [sum(of_split) for of_split in zip(*counts, strict=True)]


def is_held_out(final: NDArray[np.uint64], share: float) -> NDArray[np.bool_]:
    """Whether documents are held out, by the hash of their text alone, so from every corpus of that share."""
    return final < np.uint64(min(int(share * 2**64), 2**64 - 1))


def tally(members: pa.Table, stay: NDArray[np.int64], holdout: float) -> Tally:
    """The tally of the members that stay and that no later step drops."""
    tokens, final = column(members, "tokens")[stay], column(members, "final")[stay]
    tokens, final = tokens[tokens >= 0].astype(np.int64), final[tokens >= 0]
    held_out = is_held_out(final, holdout)
    masks = ~held_out, held_out
    counts = int(masks[0].sum()), int(masks[1].sum())
    sums = int(tokens[masks[0]].sum()), int(tokens[masks[1]].sum())
    return Tally(counts, sums, int(final.min()) if final.size else 2**64)
