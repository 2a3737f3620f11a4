"""Decides which conversations of a source are kept, by filters, by content, and by `share` or `count`.

A task judges its conversations one by one (`Judge`). It cannot decide a step over the whole source
(`exact-duplicates`, `near-duplicates`): it records what that step compares, and continues as if the
conversation had passed. `resolve` then decides these steps for all tasks together, and counts later steps
only for conversations that reach them.

Invariants:
- The outcome equals that of applying each step to the whole source in turn. It is a function of the set of
  conversations, of the seed, and of the sets that the parts under `not_in` keep.
- Of a group of similar conversations, the one with the smallest hash of its content stays; none when a part
  under `not_in` keeps one of the group.

Memory: about 280 bytes for each conversation that reaches the first step over the whole source (or is kept,
if there is no such step), of which 79 are needed while such a step is resolved, one array of values at a time
(measured); 48 for each conversation of a part under `not_in`; and about 100 for each row of the table of
rejects, which is sorted in memory. So 10^7 conversations take about 3 GB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from datatrove.data import Document
from numpy.typing import NDArray

from apertus_model.chat.messages import Message
from apertus_model.data.conversations.text import TEXTS
from apertus_model.data.corpora.duplicates import MinHash, first_alike, text_hash
from apertus_model.data.corpora.filters import Check, Drop, make_check
from apertus_model.data.corpora.scored import TaskScores
from infra.store import Artifact
from specs.base import canonical_json
from specs.filters import GLOBAL_FILTERS, ExactDuplicatesFilter, FilterSpec, NearDuplicatesFilter, labels
from specs.stages.conversations import ConversationSource

KEPT = "kept.npy"
HASHES = np.dtype([("conversation", "<u8"), ("answer", "<u8")])
"""A row of `kept.npy`: the `text_hash` of a kept conversation's text and of its answer, as filters read
them."""


class Judged(NamedTuple):
    """The outcome of the steps on single conversations for one of them."""

    step: int  # the step that drops it, or the number of steps
    drop: Drop | None
    hashes: tuple[int, int]  # as in `HASHES`
    # by step over the whole source that it reaches: (buckets,); two are alike if one of the values is equal
    compared: dict[int, NDArray[np.uint64]]
    columns: dict[str, Any]  # with the columns that filters add


class Judge:
    """The filters of a source, applied to one conversation after the other.

    Attributes:
        buckets: the number of values that each step over the whole source compares.
    """

    def __init__(
        self, filters: Sequence[FilterSpec], scratch: Path, scores: Sequence[TaskScores] = ()
    ) -> None:
        """`scores`: by the models that filters name; the conversations must come in the order of the task."""
        self._filters, self._scores = filters, scores
        self._compare: dict[int, Callable[[str], NDArray[np.uint64]]] = {}
        self._checks: dict[int, Check] = {}
        self.buckets: dict[int, int] = {}
        for index, step in enumerate(filters):
            if isinstance(step, NearDuplicatesFilter):
                self._compare[index], self.buckets[index] = MinHash(step).signature, step.buckets
            elif isinstance(step, ExactDuplicatesFilter):
                self._compare[index], self.buckets[index] = _text_hash, 1
            else:
                self._checks[index] = make_check(step, scratch)

    def __call__(self, name: str, messages: Sequence[Message], metadata: dict[str, Any]) -> Judged:
        """Judges a conversation. SourceError when it lacks a column.

        Args:
            name: id of the conversation in its source.
            messages: in normal form, the last one the assistant's.
            metadata: the columns that filters read.
        """
        texts = {of: text(messages) for of, text in TEXTS.items()}
        hashes = {of: text_hash(text) for of, text in texts.items()}
        both = hashes["conversation"], hashes["answer"]
        document = Document(text="", id=name, metadata=dict(metadata))
        for one in self._scores:
            document.metadata[one.column] = one.score(hashes[self._filters[one.step].of], name)
        compared: dict[int, NDArray[np.uint64]] = {}
        for index, step in enumerate(self._filters):
            document.text = texts[step.of]
            if index in self._compare:
                compared[index] = self._compare[index](document.text)
            elif (drop := self._checks[index](document)) is not None:
                return Judged(index, drop, both, compared, document.metadata)
        return Judged(len(self._filters), None, both, compared, document.metadata)


def _text_hash(text: str) -> NDArray[np.uint64]:
    return np.array([text_hash(text)], np.uint64)


def global_steps(filters: Sequence[FilterSpec]) -> list[int]:
    """The steps over the whole source."""
    return [index for index, step in enumerate(filters) if isinstance(step, GLOBAL_FILTERS)]


class Compared:
    """The values of all records that the steps over the whole source compare: a file (buckets, records) for
    each task and step. `seen`: the parts under `not_in`, by step."""

    def __init__(
        self,
        filters: Sequence[FilterSpec],
        tasks: Sequence[dict[str, Path]],
        seen: dict[int, list[Artifact]],
    ) -> None:
        self._files = {
            step: [files[f"compared-{step}.npy"] for files in tasks] for step in global_steps(filters)
        }
        self._seen = {
            step: [_kept_file(filters[step], part) for part in parts] for step, parts in seen.items()
        }

    def own(self, step: int) -> Iterator[NDArray[np.uint64]]:
        """The values of the records, (records,), for each bucket."""
        for bucket in range(len(_opened(self._files[step][0]))):
            yield np.concatenate([np.array(_opened(file)[bucket]) for file in self._files[step]])

    def seen(self, step: int, bucket: int) -> NDArray[np.uint64]:
        """The values of a bucket for all conversations of the parts under `not_in`: (conversations,)."""
        parts = [
            np.array(_opened(file)[column] if column else _opened(file)[bucket])
            for file, column in self._seen.get(step, [])
        ]
        return np.concatenate(parts) if parts else np.empty(0, np.uint64)


def _opened(file: Path) -> NDArray[Any]:
    # Opened for each use: there can be more tasks than files that a process may have open.
    array: NDArray[Any] = np.load(file, mmap_mode="r", allow_pickle=False)
    return array


def kept_name(step: FilterSpec) -> str:
    """The key, in the facts of an artifact, of the file by which a step of near-duplicates compares its kept
    conversations. Equal settings have equal keys."""
    return canonical_json(step.identity_fields())


def _kept_file(step: FilterSpec, part: Artifact) -> tuple[Path, str]:
    """The file of a part under `not_in` that a step reads, and its column."""
    if isinstance(step, ExactDuplicatesFilter):
        return part.local(KEPT), step.of
    return part.local(part.manifest.facts["compared"][kept_name(step)]), ""


class Resolution(NamedTuple):
    """The outcome for all records."""

    gone: NDArray[np.int16]  # (records,): the step over the whole source that drops each, else -1
    group: NDArray[
        np.int64
    ]  # (records,): size of the group of similar records where `gone`; 0 if a part under `not_in` has one
    alive: NDArray[np.bool_]  # (records,): whether each passes all steps
    dropped: dict[str, int]  # number of records, by label of the step


def resolve(
    filters: Sequence[FilterSpec], step_of: NDArray[np.int16], order: NDArray[np.int64], compared: Compared
) -> Resolution:
    """Decides the steps over the whole source.

    Args:
        step_of: (records,): the step that dropped each in its task, or the number of steps.
        order: (records,): indices of the records, sorted by the hash of their content.
    """
    alive = np.ones(len(step_of), bool)
    gone, group = np.full(len(step_of), -1, np.int16), np.zeros(len(step_of), np.int64)
    dropped: dict[str, int] = {}
    for index, label in enumerate(labels(list(filters))):
        if isinstance(filters[index], GLOBAL_FILTERS):
            members = order[alive[order] & (step_of[order] > index)]
            before = len(compared.seen(index, 0))
            found = first_alike(
                before + len(members),
                (
                    np.concatenate([compared.seen(index, bucket), values[members]])
                    for bucket, values in enumerate(compared.own(index))
                ),
            )
            sizes = np.bincount(found, minlength=len(found))
            first = found[before:]
            twice = first != before + np.arange(len(members))
            out = np.zeros(len(step_of), bool)
            out[members[twice]] = True
            gone[out] = index
            group[members] = np.where(first < before, 0, sizes[first])
        else:
            out = alive & (step_of == index)
        alive &= ~out
        dropped[label] = int(out.sum())
    return Resolution(gone, group, alive, dropped)


def chosen(
    process: ConversationSource, places: NDArray[np.uint64], contents: NDArray[np.uint64]
) -> NDArray[np.bool_]:
    """(n,): whether `share` or `count` chooses each of n conversations, which differ in content.

    Args:
        places: (n,): hash of seed and content.
        contents: (n,): hash of the content, which decides between equal places.
    """
    if process.share is not None:
        below: NDArray[np.bool_] = places < int(Fraction(repr(process.share)) * 2**64)
        return below
    result = np.ones(len(places), bool)
    if process.count is not None:
        result[np.lexsort((contents, places))[process.count :]] = False
    return result
