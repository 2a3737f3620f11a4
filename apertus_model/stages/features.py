"""The `features` part of a `classifier` stage: what the classifier reads from the documents of one source.

Artifact: `features-00000.parquet`, ..., a row per document, in the order of the source:

    hash       uint64, of the whole text (`text_hash`)
    label      of its column, as text; null without a column
    language   of its column; "" where there is none
    text       cut to `max_characters`; or, with an encoder,
    embedding  float32, the mean of the encoder's last hidden states

Invariant: work is restartable by task (`files_per_task` files), and the split changes no row.
"""

from functools import cached_property

import pyarrow as pa
from pyarrow.parquet import ParquetWriter

from apertus_model.classifiers.reading import ReadDocument, put_shards, read_source, windows
from apertus_model.classifiers.scorers import open_encoder
from apertus_model.classifiers.transformer import Transformer
from apertus_model.data.documents.readers import files_of_tasks
from apertus_model.progress import Progress
from apertus_model.stop import StopSignal
from apertus_model.trainer.process import prepare_process
from apertus_model.work import Result, run_units
from infra.store import Attempt
from infra.store.inputs import SourceError
from specs.stages.classifier import FeaturesPart

COLUMNS = [("hash", pa.uint64()), ("label", pa.string()), ("language", pa.string())]


def run(attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Runs the part. SourceError for a source without documents or labels."""
    part = FeaturesPart.model_validate(attempt.job.spec)
    units = run_units(Units(attempt), attempt, stop, progress, processes=part.WORKERS)
    documents = sum(unit.data for unit in units)
    shards = put_shards(attempt, units, "features", part.source, documents)
    progress.log(f"{documents} documents")
    attempt.commit(metrics={"documents": documents}, facts={"shards": shards})


class Units:
    """Tasks of files, whose texts one encoder embeds."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._part = FeaturesPart.model_validate(attempt.job.spec)
        self.units = files_of_tasks(self._part, "features")

    def run(self, key: str) -> Result:
        path = self._attempt.workdir / f"{key}.parquet"
        encoder = self._encoder
        content = pa.string() if encoder is None else pa.list_(pa.float32(), encoder.config.hidden_size)
        schema = pa.schema([*COLUMNS, ("text" if encoder is None else "embedding", content)])
        documents = 0
        with ParquetWriter(path, schema) as writer:
            documents_of_task = read_source(self._part.source, self.units[key], self._part.max_characters)
            for window in windows(documents_of_task):
                texts = [document.text for document in window]
                columns = {
                    "hash": [document.hash for document in window],
                    "label": [self._label(document) for document in window],
                    "language": [self._language(document) for document in window],
                    schema.names[-1]: texts if encoder is None else list(encoder.embeddings(texts)),
                }
                writer.write_table(pa.Table.from_pydict(columns, schema))
                documents += len(window)
        return Result({"features.parquet": path}, documents)

    def _label(self, document: ReadDocument) -> str | None:
        column = self._part.label_column
        if column is None:
            return None
        value = document.columns.get(column)
        label = str(value).lower() if isinstance(value, bool) else "" if value is None else str(value)
        if not label or any(character.isspace() or character in "/," for character in label):
            raise SourceError(
                f"'{document.file}' of {self._part.source.url}: a document has {repr(value)[:80]} in column"
                f" '{column}', which is no label. Fix: use labels without white space, / and ,"
            )
        return label

    def _language(self, document: ReadDocument) -> str:
        value = document.columns.get(self._part.language_column or "")
        return "" if value is None else str(value)

    @cached_property
    def _encoder(self) -> Transformer | None:
        if self._part.encoder is None:
            return None
        prepare_process(self._attempt.job.launch.cpu_threads)
        return open_encoder(self._part.encoder, self._attempt.workdir)
