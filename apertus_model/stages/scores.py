"""The `scores` part of a corpus or of conversations: the scores of all documents of one source by one model.

Artifact: `scores-00000.parquet`, ..., a row per document, in the order of the source: `file` (int32, its
index in the sorted listing), `hash` (uint64, of the whole text), `score` (float32; null where the classifier
has no model for the document's language). The facts name the files of the source that each shard covers, and
the thresholds of the classifier for this label.

Invariants: the model is opened, and asked for its label, before any document is read. Work is restartable by
task (`files_per_task` files).
"""

from functools import cached_property

import numpy as np
import pyarrow as pa
from pyarrow.parquet import ParquetWriter

from apertus_model.classifiers.measures import ALL
from apertus_model.classifiers.reading import ReadDocument, put_shards, read_source, windows
from apertus_model.classifiers.scorers import Scorer, open_scorer
from apertus_model.classifiers.transformer import ClassifierError
from apertus_model.data.documents.readers import files_of_tasks
from apertus_model.progress import Progress
from apertus_model.stop import StopSignal
from apertus_model.trainer.process import prepare_process
from apertus_model.work import Result, run_units
from infra.store import Artifact, Attempt
from specs.stages.classifier import ScoresPart

SCHEMA = pa.schema([("file", pa.int32()), ("hash", pa.uint64()), ("score", pa.float32())])
BINS = 20


def run(attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Runs the part. ClassifierError: the model cannot score. SourceError: the source has no documents."""
    part = ScoresPart.model_validate(attempt.job.spec)
    work = Units(attempt)
    units = run_units(work, attempt, stop, progress, processes=part.WORKERS)
    histogram = np.sum([unit.data["histogram"] for unit in units], axis=0)
    without = sum(unit.data["without"] for unit in units)
    documents = int(histogram.sum()) + without
    names = put_shards(attempt, units, "scores", part.source, documents)
    shards = [{"name": name, "files": span} for name, span in zip(names, work.spans, strict=True)]
    progress.log(f"{documents} documents")
    stored = work.classifier
    thresholds = stored.manifest.facts["thresholds"][part.label] if stored is not None else {}
    attempt.commit(
        metrics={
            "documents": documents,
            "histogram": histogram.tolist(),
            **({"without_score": without} if part.language_column is not None else {}),
        },
        facts={"shards": shards, "thresholds": thresholds},
    )


class Units:
    """Tasks of files, whose documents one model scores."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._part = ScoresPart.model_validate(attempt.job.spec)
        self.units = files_of_tasks(self._part, "scores")
        self._places = {path: place for place, path in enumerate(self._part.listing)}
        if not self._places:
            files = (path for task in self.units.values() for path in task)
            self._places = {path: place for place, path in enumerate(files)}

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The first file of each task and the one after its last, as indices in the listing."""
        return [(self._places[task[0]], self._places[task[-1]] + 1) for task in self.units.values()]

    @property
    def classifier(self) -> Artifact | None:
        """The classifier that a stage trained; None without such an input."""
        given = "classifier" in self._attempt.job.inputs
        return self._attempt.input_artifact("classifier") if given else None

    def run(self, key: str) -> Result:
        """Scores a task. The data of the unit are the numbers of documents in `BINS` bins of the score from 0
        to 1 (other scores, of a regression, count in the outer bins) and of documents without a score."""
        scorer, path = self._scorer, self._attempt.workdir / f"{key}.parquet"
        histogram, without = np.zeros(BINS, np.int64), 0
        with ParquetWriter(path, SCHEMA) as writer:
            part, files = self._part, self.units[key]
            for window in windows(read_source(part.source, files, scorer.characters, part.of)):
                scores = self._values(scorer, window)
                values = np.array([value for value in scores if value is not None], np.float32)
                if not np.isfinite(values).all():
                    raise ClassifierError(
                        f"a score of '{window[0].file}' or a file after it is not a finite number. Fix: use a"
                        " model that computes in float32"
                    )
                histogram += np.histogram(np.clip(values, 0, 1), BINS, (0, 1))[0]
                without += len(scores) - len(values)
                columns = {
                    "file": [self._places[document.file] for document in window],
                    "hash": [document.hash for document in window],
                    "score": scores,
                }
                writer.write_table(pa.Table.from_pydict(columns, SCHEMA))
        return Result({"scores.parquet": path}, {"histogram": histogram.tolist(), "without": without})

    def _values(self, scorer: Scorer, window: list[ReadDocument]) -> list[np.float32 | None]:
        """The score of each document, None if its language has no model; equal documents are scored once."""
        column = self._part.language_column
        asked = [
            (document.text, str(document.columns.get(column)) if column is not None else ALL)
            for document in window
        ]
        scored = [
            pair for pair in dict.fromkeys(asked) if scorer.languages is None or pair[1] in scorer.languages
        ]
        texts, languages = [text for text, _ in scored], [language for _, language in scored]
        known = dict(zip(scored, scorer.scores(texts, languages), strict=True)) if scored else {}
        return [known.get(pair) for pair in asked]

    @cached_property
    def _scorer(self) -> Scorer:
        if self._part.method != "fasttext":
            prepare_process(self._attempt.job.launch.cpu_threads)
        return open_scorer(self._part, self.classifier, self._attempt.workdir)
