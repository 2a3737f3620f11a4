"""The filters of a corpus, document by document, in the filter tasks.

A task applies the steps in their order. It cannot decide a step over the whole source (`exact-duplicates`,
`near-duplicates`): it records hashes and continues as if the document had passed. `verdicts.py` then decides
these steps for all tasks together, and later steps count only for documents that reach them.

Invariants:
- The outcome equals that of applying each step to the whole source in turn, whatever the order of documents.
- Every document has one record, with the step that drops it here, if one does, and the reason.
- The reason holds what the filter measured. It may quote a question of an evaluation, which the document
  holds; where the spec wants no examples, such a reason states the rule alone.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from datatrove.data import Document
from numpy.typing import NDArray

from apertus_model.data.corpora.duplicates import MinHash, text_hash
from apertus_model.data.corpora.examples import Examples, Row, cut, cut_at_change, to_jsonl
from apertus_model.data.corpora.filters import Check, Drop, limited_to, make_check
from apertus_model.data.corpora.pii import Replacer
from apertus_model.data.corpora.records import (
    REJECTED,
    REPEATED,
    SIDE,
    RecordWriter,
    excluded_values,
    near_steps,
    record_schema,
    row_hash,
    side_values,
    signature_column,
)
from apertus_model.data.documents.parsed import Rejection
from infra.store import Artifact, Attempt
from specs.filters import GLOBAL_FILTERS, DecontaminateFilter, FilterSpec, NearDuplicatesFilter, labels
from specs.stages.corpus import CorpusSource

DROPPED = "dropped"
CHARACTERS = "dropped_characters"
NO_COLUMNS = text_hash("[]")
TEXT = "conversation"
"""The `of` of all filters of documents."""


class Judged(NamedTuple):
    """What the filters of single documents say about a document."""

    step: int  # the step that drops it, or the number of steps
    drop: Drop | None
    signatures: dict[tuple[str, str], NDArray[np.uint64]]
    """(buckets,): of the near-duplicate steps before `step`, by their `of` and `signature_column`."""


class DocumentJudge:
    """The filters of a source, applied to one document after the other."""

    def __init__(self, filters: Sequence[FilterSpec], scratch: Path) -> None:
        self._filters = filters
        self._checks: dict[int, Check] = {
            index: make_check(step, scratch)
            for index, step in enumerate(filters)
            if not isinstance(step, GLOBAL_FILTERS)
        }
        self._signers = {signature_column(step): MinHash(step) for step in near_steps(filters)}

    def __call__(self, document: Document, texts: Mapping[str, str]) -> Judged:
        """Judges a document, whose text becomes that of the last filter. SourceError when it lacks a column.
        `texts`: those that filters read, by their `of`."""
        signatures: dict[tuple[str, str], NDArray[np.uint64]] = {}
        for index, step in enumerate(self._filters):
            document.text = texts[step.of]
            if isinstance(step, NearDuplicatesFilter):
                if (key := (step.of, signature_column(step))) not in signatures:
                    signatures[key] = self._signers[key[1]].signature(document.text)
            elif index in self._checks and (drop := self._checks[index](document)) is not None:
                return Judged(index, drop, signatures)
        return Judged(len(self._filters), None, signatures)


class DocumentSelection:
    """The selection of the documents of one task. `tokens_of`: the number of tokens of a text as a document.
    Counts: `read` (documents, bytes, characters), `rejected` (by reason), `tokenised` (passed on)."""

    def __init__(self, process: CorpusSource, scratch: Path, tokens_of: Callable[[str], int]) -> None:
        self.read = Counter(documents=0, bytes=0, characters=0)
        self.rejected = Counter[str]()
        self.tokenised = 0
        self._tokens_of = tokens_of
        self._steps = process.filters
        self._labels = labels(process.filters)
        self._columns = process.columns()
        self._examples = Examples(wanted=process.examples)
        self._schema = record_schema(process)
        self._replacer, self._replaces = Replacer(process.replaced), limited_to(process.replaced_only)
        self._judge = DocumentJudge(process.filters, scratch)
        self._signed = [(TEXT, signature_column(step)) for step in near_steps(process.filters)]

    def run(self, documents: Iterable[Document | Rejection], prefix: str) -> Iterator[Document]:
        """Passes on the documents that no filter of single documents drops, with personal data replaced.
        Writes `<prefix>documents.parquet` and `<prefix>examples.jsonl`."""
        with RecordWriter(Path(f"{prefix}documents.parquet"), self._schema, REPEATED) as writer:
            for document in documents:
                if isinstance(document, Rejection):
                    self.rejected[document.reason] += 1
                    writer.add(self._rejected_row(document))
                    continue
                size = len(document.text.encode())
                self.read.update(documents=1, bytes=size, characters=len(document.text))
                row, passes = self._row(document)
                writer.add(row)
                if passes:
                    self.tokenised += 1
                    yield document
        Path(f"{prefix}examples.jsonl").write_bytes(to_jsonl(self._examples.rows()))

    def _row(self, document: Document) -> tuple[tuple[Any, ...], bool]:
        """The record of a document, in which personal data are replaced, and whether it passes."""
        text = document.text
        key = text_hash(text), self._columns_hash(document)
        passed, drop, signatures = self._judge(document, {TEXT: text})
        replaced: Sequence[int] = (0,) * len(self._replacer.kinds)
        reason = None
        if drop is None:
            if self._replaces(document.metadata):
                document.text, replaced = self._replacer(text)
            self._examples.offer("kept", key, partial(_shown, document.text))
            if any(replaced):
                self._examples.offer("replaced", key, partial(cut_at_change, text, document.text))
        else:
            shown = partial(_shown, text, value=drop.value, rule=drop.rule)
            self._examples.offer(self._labels[passed], key, shown)
            reason = self._reason(passed, drop)
        final = 0 if drop else key[0] if document.text is text else text_hash(document.text)
        side = side_values(document)
        closed = (*excluded_values(drop), self._tokens_of(text) if drop and drop.excluded else 0)
        row = (*key, final, row_hash(side), len(text), passed, *replaced, *side, reason, *closed)
        return (*row, *map(signatures.get, self._signed)), drop is None

    def _rejected_row(self, rejection: Rejection) -> tuple[Any, ...]:
        side = (rejection.id, *(None for _ in SIDE[1:]))
        counts, unsigned = (0,) * len(self._replacer.kinds), (None,) * len(self._signed)
        row = (0, 0, 0, row_hash(side), 0, REJECTED, *counts, *side, rejection.reason)
        return (*row, *excluded_values(None), 0, *unsigned)

    def _reason(self, step: int, drop: Drop) -> str:
        if isinstance(self._steps[step], DecontaminateFilter) and not self._examples.wanted:
            return f"required: {drop.rule}"
        return drop.reason

    def _columns_hash(self, document: Document) -> int:
        if not self._columns:
            return NO_COLUMNS
        values = json.dumps([document.metadata.get(name) for name in self._columns], default=str)
        return text_hash(values)


def _shown(text: str, **facts: str) -> Row:
    return {"text": cut(text), **facts}


def global_steps(steps: Sequence[FilterSpec]) -> list[int]:
    """The indices of the steps over the whole source."""
    return [index for index, step in enumerate(steps) if isinstance(step, GLOBAL_FILTERS)]


def not_in(attempt: Attempt, steps: Sequence[FilterSpec]) -> dict[int, list[Artifact]]:
    """The artifacts that each step over the whole source compares with: what they keep counts as seen."""
    return {
        index: [attempt.input_artifact(f"not_in:{index}:{number}") for number in range(len(step.not_in))]
        for index, step in enumerate(steps)
        if isinstance(step, GLOBAL_FILTERS)
    }
