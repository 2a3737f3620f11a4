"""Scores of documents by a model, joined to the documents of a corpus as a column.

Invariant: a document has the score of its own text: a `scores` artifact has the documents in the order in
which the corpus reads them, and their hashes are compared one by one. A block of rows is in memory at a time,
and the tasks need not be those of the artifact.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pyarrow.parquet
from datatrove.data import DocumentsPipeline
from datatrove.pipeline.base import PipelineStep

from apertus_model.data.duplicates import text_hash
from infra.store import Artifact
from infra.store.inputs import SourceError
from specs.scoring import percentile_name
from specs.stages.corpus import CorpusSource

ROWS = 65_536


class StoredScores(NamedTuple):
    """A `scores` artifact, and the filter that reads it."""

    artifact: Artifact
    step: int  # of the filter
    column: str

    @property
    def thresholds(self) -> dict[str, dict[str, float]]:
        """By language and name of the percentile."""
        found: dict[str, dict[str, float]] = self.artifact.manifest.facts["thresholds"]
        return found

    def rows(self, start: int, stop: int) -> Iterator[tuple[int, float]]:
        """Hashes and scores of the documents in the files [start, stop) of the listing, in order."""
        for shard in self.artifact.manifest.facts["shards"]:
            first, end = shard["files"]
            if first >= stop or end <= start:
                continue
            table = pyarrow.parquet.ParquetFile(self.artifact.local(shard["name"]))
            for batch in table.iter_batches(ROWS):
                for file, digest, score in zip(
                    *(column.to_pylist() for column in batch.columns), strict=True
                ):
                    if start <= file < stop:
                        yield digest, score


class ScoreColumn(PipelineStep):
    """Adds the column to the documents of a task. `tasks`: the files of each task, in the order of the
    listing."""

    type = "ANNOTATOR"
    name = "scores"

    def __init__(self, scores: StoredScores, tasks: list[list[str]]) -> None:
        super().__init__()
        self._scores = scores
        self._sizes = [len(files) for files in tasks]

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        start = sum(self._sizes[:rank])
        rows = self._scores.rows(start, start + self._sizes[rank])
        for document in data:
            wanted = text_hash(document.text)
            score = next((score for digest, score in rows if digest == wanted), None)
            if score is None:
                raise SourceError(
                    f"document {document.id} has no score in {self._scores.artifact.path}: the files have"
                    " changed since they were scored. Fix: plan again"
                )
            document.metadata[self._scores.column] = score
            yield document


def with_thresholds(process: CorpusSource, scores: tuple[StoredScores, ...]) -> CorpusSource:
    """The filters with the stored thresholds in place of the percentiles that they name."""
    filters: list[Any] = list(process.filters)
    for one in scores:
        chosen = process.scored[one.step]
        numbers: dict[str, Any] = {}
        for bound, others in (("min", "cutoffs"), ("max", "ceilings")):
            name = getattr(chosen, bound)
            if not isinstance(name, str):
                continue
            stored = {
                language: found[percentile_name(float(name[1:]))]
                for language, found in one.thresholds.items()
            }
            every = stored.pop("")
            numbers |= {bound: every} if chosen.by is None else {bound: None, others: stored}
        filters[one.step] = chosen.model_copy(update=numbers)
    return process.model_copy(update={"filters": filters})
