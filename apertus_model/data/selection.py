"""The filters of a corpus, first document by document in the tasks, then over all of them.

A task applies the steps in their order. It cannot decide a step over the whole source (`exact-duplicates`,
`near-duplicates`): it records hashes and continues as if the document had passed. `resolve` then decides
these steps for all tasks together, and counts later steps only for documents that reach them.

Invariants:
- The outcome equals that of applying each step to the whole source in turn; it is a function of the set of
  documents.
- Of a group of similar documents, the one whose text has the smallest hash stays. Among equal texts it is the
  one with the smallest hash of the columns that filters read. Names, positions and tasks do not matter.
- Every document is counted once: tokenised and kept, or dropped under the label of one step.

Memory: 47 bytes per document that reaches the first step over the whole source (or is kept, without such a
step), until the corpus is written; 116 in all while `resolve` decides such a step (measured with 14 buckets,
which are read one at a time): 116 GB for 10^9 documents of one source, in about half an hour. Split larger
sources.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from datatrove.data import Document, DocumentsPipeline
from datatrove.pipeline.base import PipelineStep
from numpy.typing import NDArray

from apertus_model.data.duplicates import MinHash, first_alike, text_hash
from apertus_model.data.examples import Examples, Key, Row, cut, cut_at_change, to_jsonl
from apertus_model.data.filters import Check, Drop, make_check
from apertus_model.data.pii import Replacer
from apertus_model.data.tallies import Tally
from specs.filters import GLOBAL_FILTERS, FilterSpec, NearDuplicatesFilter, labels
from specs.stages.corpus import CorpusSource

DROPPED = "dropped"
CHARACTERS = "dropped_characters"


def record_type(kinds: int) -> np.dtype[Any]:
    """The record of a document that reached the first step over the whole source, or the end. `kinds`: number
    of kinds of personal data."""
    fields = [
        ("text", "<u8"),  # hash of the text as read
        ("columns", "<u8"),  # hash of the columns that filters read
        ("final", "<u8"),  # hash of the text as tokenised
        ("characters", "<i8"),  # characters of the text as read
        ("step", "<i2"),  # the step that dropped it in its task, or the number of steps
        ("replaced", "<u4", (kinds,)),  # replacements by kind
    ]
    return np.dtype(fields)


class Selection(PipelineStep):
    """Passes on the documents that no step of single documents drops, with personal data replaced. Writes
    at the end, in `folder`: `<rank>_documents.npy`, `<rank>_signatures-<step>.npy` (buckets, records) and
    `<rank>_examples.jsonl`; `counts` are drops before the first step over the whole source."""

    type = "FILTER"
    name = "selection"

    def __init__(self, process: CorpusSource, folder: Path) -> None:
        super().__init__()
        self._steps = process.filters
        self._labels = labels(process.filters)
        self._columns = process.columns()
        self._examples = process.examples
        self._folder = folder
        self._replacer = Replacer(process.replaced)
        self._checks: dict[int, Check] = {
            index: make_check(step, folder)
            for index, step in enumerate(self._steps)
            if not isinstance(step, GLOBAL_FILTERS)
        }
        self._signers = {
            index: MinHash(step)
            for index, step in enumerate(self._steps)
            if isinstance(step, NearDuplicatesFilter)
        }
        self._first = first_global(self._steps)
        self.counts: dict[str, dict[str, int]] = {
            name: dict.fromkeys(self._labels, 0) for name in (DROPPED, CHARACTERS)
        }

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        records: list[tuple[Any, ...]] = []
        signatures: dict[int, list[NDArray[np.uint64]]] = {index: [] for index in self._signers}
        examples = Examples(wanted=self._examples)
        tally = Tally()
        for document in data:
            text = document.text
            key = text_hash(text), self._columns_hash(document)
            passed, drop, signed = self._judge(document)
            decided = drop is not None and passed < self._first
            tally.add(document, len(text), drop, self._labels[passed] if decided else None)
            if drop is not None:
                label = self._labels[passed]
                examples.offer(label, key, partial(_dropped, text, drop))
                if passed < self._first:
                    self.counts[DROPPED][label] += 1
                    self.counts[CHARACTERS][label] += len(text)
                    continue
            replaced = (0,) * len(self._replacer.kinds)
            if drop is None:
                document.text, replaced = self._replacer(text)
                examples.offer("kept", key, partial(_kept, document.text))
                if any(replaced):
                    examples.offer("replaced", key, partial(cut_at_change, text, document.text))
            records.append((*key, 0 if drop else text_hash(document.text), len(text), passed, replaced))
            for index, rows in signatures.items():
                rows.append(
                    signed[index] if index in signed else np.zeros(self._signers[index].buckets, np.uint64)
                )
            if drop is None:
                yield document
        np.save(
            self._folder / f"{rank:05d}_documents.npy",
            np.array(records, dtype=record_type(len(self._replacer.kinds))),
        )
        for index, rows in signatures.items():
            by_bucket = np.array(rows, np.uint64).reshape(len(rows), self._signers[index].buckets).T
            np.save(self._folder / f"{rank:05d}_signatures-{index}.npy", np.ascontiguousarray(by_bucket))
        tally.write(self._folder / f"{rank:05d}_tallies.parquet")
        (self._folder / f"{rank:05d}_examples.jsonl").write_bytes(to_jsonl(examples.rows()))

    def _judge(self, document: Document) -> tuple[int, Drop | None, dict[int, NDArray[np.uint64]]]:
        """Returns the step that drops the document, or the number of steps; the reason; and the document's
        signatures, by step of near-duplicates before that."""
        signed: dict[int, NDArray[np.uint64]] = {}
        for index in range(len(self._steps)):
            if index in self._signers:
                signed[index] = self._signers[index].signature(document.text)
            elif index in self._checks and (drop := self._checks[index](document)) is not None:
                return index, drop, signed
        return len(self._steps), None, signed

    def _columns_hash(self, document: Document) -> int:
        values = json.dumps([document.metadata.get(name) for name in self._columns], default=str)
        return text_hash(values)


def _dropped(text: str, drop: Drop) -> Row:
    return {"text": cut(text), "value": drop.value, "rule": drop.rule}


def _kept(text: str) -> Row:
    return {"text": cut(text)}


def first_global(steps: Sequence[FilterSpec]) -> int:
    """The first step over the whole source, or the number of steps."""
    return next((index for index, step in enumerate(steps) if isinstance(step, GLOBAL_FILTERS)), len(steps))


@dataclass(frozen=True)
class Selected:
    """The records of all tasks, in order."""

    records: NDArray[Any]  # (records,), each a `record_type`
    starts: NDArray[np.int64]  # records of task t begin at `starts[t]` and end at `starts[t + 1]`
    tokenised: NDArray[np.bool_]  # (records,): which were tokenised
    signatures: dict[int, list[Path]]  # files of the tasks, for each step of near-duplicates

    @classmethod
    def open(cls, tasks: Sequence[dict[str, Path]], steps: Sequence[FilterSpec]) -> Selected:
        """Opens the files of `Selection`, named without their rank. There must be at least one task."""
        parts = [np.load(files["documents.npy"], allow_pickle=False) for files in tasks]
        records = np.concatenate(parts)
        near = [index for index, step in enumerate(steps) if isinstance(step, NearDuplicatesFilter)]
        signatures = {index: [files[f"signatures-{index}.npy"] for files in tasks] for index in near}
        return cls(records, np.cumsum([0, *map(len, parts)]), records["step"] == len(steps), signatures)

    def task(self, number: int) -> slice:
        """Where the records of a task are."""
        return slice(int(self.starts[number]), int(self.starts[number + 1]))

    def buckets(self, step: int) -> Iterator[NDArray[np.uint64]]:
        """The arrays of values, each (records,), by which a step compares documents: the hashes of their
        texts, or one array per bucket of their signatures."""
        if step not in self.signatures:
            yield self.records["text"]
            return
        files = self.signatures[step]
        for bucket in range(len(np.load(files[0], mmap_mode="r", allow_pickle=False))):
            # Opened one by one: there can be more tasks than a process may have files open.
            yield np.concatenate(
                [np.array(np.load(file, mmap_mode="r", allow_pickle=False)[bucket]) for file in files]
            )


class Duplicate(NamedTuple):
    """A document that was dropped because a similar one is kept."""

    document: int  # index in the records of all tasks
    kept: int  # index of the document that is kept
    group: int  # size of their group
    text: int  # hash of the document's text


@dataclass
class Resolution:
    """The outcome of the steps over the whole source."""

    kept: NDArray[np.bool_]  # (records,): which records become part of the corpus
    gone: NDArray[np.int16]  # (records,): the step over the whole source that dropped a record, or -1
    counts: dict[str, dict[str, int]]  # drops by the first such step and the steps after it
    replaced: list[int]  # replacements in kept documents, by kind
    duplicates: dict[str, list[Duplicate]] = field(default_factory=dict)  # to show, by label of the step


def resolve(steps: Sequence[FilterSpec], selected: Selected, shown: int = 3) -> Resolution:
    """Decides the steps over the whole source, and counts the later ones. `shown`: number of duplicates to
    name for each such step."""
    records = selected.records
    names = labels(list(steps))
    counts: dict[str, dict[str, int]] = {DROPPED: {}, CHARACTERS: {}}
    alive = np.ones(len(records), bool)
    result = Resolution(alive, np.full(len(records), -1, np.int16), counts, [])
    first = first_global(steps)
    order = np.lexsort((records["columns"], records["text"])) if first < len(steps) else np.empty(0, np.int64)
    for index in range(first, len(steps)):
        if isinstance(steps[index], GLOBAL_FILTERS):
            members = order[alive[order] & (records["step"][order] > index)]
            found = first_alike(len(members), (values[members] for values in selected.buckets(index)))
            dropped = np.zeros(len(records), bool)
            dropped[members[found != np.arange(len(members))]] = True
            result.gone[dropped] = index
            result.duplicates[names[index]] = _shown(selected, members, found, shown)
        else:
            dropped = alive & (records["step"] == index)
        alive &= ~dropped
        counts[DROPPED][names[index]] = int(dropped.sum())
        counts[CHARACTERS][names[index]] = int(records["characters"][dropped].sum())
    assert bool(selected.tokenised[alive].all())
    result.replaced = records["replaced"][alive].sum(axis=0, dtype=np.int64).tolist()
    return result


def missing(resolution: Resolution, selected: Selected) -> Callable[[str, Key], bool]:
    """For `examples.choose`: whether all documents with a key were dropped as duplicates."""
    texts, columns = selected.records["text"], selected.records["columns"]

    def gone(reason: str, key: Key) -> bool:
        same = np.flatnonzero((texts == np.uint64(key[0])) & (columns == np.uint64(key[1])))
        return bool(same.size) and bool((resolution.gone[same] >= 0).all())

    return gone


def _shown(
    selected: Selected, members: NDArray[np.int64], found: NDArray[np.int64], shown: int
) -> list[Duplicate]:
    """The first duplicates by hash among those whose tokens were written, so that their text can be shown."""
    candidates = np.flatnonzero((found != np.arange(len(found))) & selected.tokenised[members])
    hashes = selected.records["text"][members[candidates]]
    _, places = np.unique(hashes.byteswap(), return_index=True)
    chosen = candidates[places[:shown]]
    sizes = [int((found == found[i]).sum()) for i in chosen]
    return [
        Duplicate(int(members[i]), int(members[found[i]]), size, int(selected.records["text"][members[i]]))
        for i, size in zip(chosen, sizes, strict=True)
    ]
