"""Joins a model's scores to the documents of a corpus, or conversations, as a column.

Invariant: a document has the score of its own text: a `scores` artifact has the documents in the order in
which the stage reads them, and their hashes are compared one by one. A block of rows is in memory at a time,
and the tasks need not be those of the artifact.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow.parquet
from datatrove.data import Document

from apertus_model.data.corpora.duplicates import text_hash
from apertus_model.data.documents.parsed import Rejection
from infra.store import Artifact, Attempt
from infra.store.inputs import SourceError
from specs.filters import FilterSpec, scored
from specs.scoring import percentile_name

ROWS = 65_536


class StoredScores(NamedTuple):
    """A `scores` artifact, and the filter that reads it."""

    artifact: Artifact
    step: int  # index of the filter
    column: str

    def rows(self, start: int, stop: int) -> Iterator[tuple[int, float | None]]:
        """Hashes and scores of the documents in the files [start, stop) of the listing, in order."""
        for shard in self.artifact.manifest.facts["shards"]:
            first, end = shard["files"]
            if first >= stop or end <= start:
                continue
            table = pyarrow.parquet.ParquetFile(self.artifact.local(shard["name"]))
            for batch in table.iter_batches(ROWS):
                columns = (column.to_pylist() for column in batch.columns)
                for file, digest, score in zip(*columns, strict=True):
                    if start <= file < stop:
                        yield digest, score

    def of_task(self, tasks: Sequence[list[str]], number: int) -> TaskScores:
        """The scores of a task's documents. `tasks`: the files of each task, in the order of the listing."""
        start = sum(len(files) for files in tasks[:number])
        return TaskScores(self, start, start + len(tasks[number]))


def stored_scores(attempt: Attempt, filters: list[FilterSpec]) -> tuple[StoredScores, ...]:
    return tuple(
        StoredScores(attempt.input_artifact(f"scores:{step}"), step, chosen.column)
        for step, chosen in scored(filters).items()
    )


class TaskScores:
    """The scores of the documents of some files, read in order; documents may be left out."""

    def __init__(self, scores: StoredScores, start: int, stop: int) -> None:
        self.step, self.column = scores.step, scores.column
        self._path = scores.artifact.path
        self._rows = scores.rows(start, stop)

    def score(self, digest: int, name: str) -> float | None:
        """The score of the next document whose text has this hash; None for a language without a model.
        SourceError if there is no such document; `name` is the document's name in the message."""
        for stored, score in self._rows:
            if stored == digest:
                return score
        raise SourceError(
            f"document {name} has no score in {self._path}: the files have changed since they were scored."
            " Fix: plan again"
        )


def with_scores(
    documents: Iterable[Document | Rejection], scores: TaskScores
) -> Iterator[Document | Rejection]:
    for document in documents:
        if isinstance(document, Document):
            document.metadata[scores.column] = scores.score(text_hash(document.text), document.id)
        yield document


def with_thresholds(filters: list[FilterSpec], scores: Sequence[StoredScores]) -> list[FilterSpec]:
    """The filters with the stored thresholds in place of the percentiles that they name."""
    result: list[Any] = list(filters)
    for model_scores in scores:
        chosen = result[model_scores.step]
        numbers: dict[str, Any] = {}
        for bound, others in (("min", "cutoffs"), ("max", "ceilings")):
            name = getattr(chosen, bound)
            if not isinstance(name, str):
                continue
            stored = {
                language: values[percentile_name(float(name[1:]))]
                for language, values in model_scores.artifact.manifest.facts["thresholds"].items()
            }
            every = stored.pop("")
            numbers |= {bound: every} if chosen.by is None else {bound: None, others: stored}
        result[model_scores.step] = chosen.model_copy(update=numbers)
    return result
