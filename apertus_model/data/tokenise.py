"""The restartable tasks of a corpus, which read, select and tokenise its documents.

Invariant: the output of a task depends on its files and on the spec, not on the number of workers, the order
of tasks or other tasks. Text that spells a special token (`</s>` in a web page) is encoded as text: only the
pipeline marks document boundaries.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from datatrove.data import DocumentsPipeline
from datatrove.pipeline.base import PipelineStep
from loguru import logger
from tokenizers import Tokenizer

from apertus_model.data.found import batches
from apertus_model.data.megatron import TokenFileWriter, token_dtype
from apertus_model.data.pieces import encode
from apertus_model.data.readers import SourceReader
from apertus_model.data.scored import ScoreColumn, StoredScores, with_thresholds
from apertus_model.data.selection import Selection
from apertus_model.data.tokenised import TokenReader, TokenWriter
from apertus_model.tokenizer_files import open_tokenizer
from apertus_model.work.units import Result
from specs.sources import TABLES, TOKENISED, SourceSpec
from specs.stages.corpus import CorpusSource, needs_text

DOCUMENTS_PER_BATCH = 1000
CHARACTERS_PER_BATCH = 2**20

logger.disable("datatrove")  # it would write a line for every file


class DocumentTokeniser(PipelineStep):
    """A step that writes `bos document eos` for each document to `<folder>/<rank>_tokens.bin/.idx`, with no
    special token inside a document. Its output is that of datatrove's Megatron writer, but it works in
    batches of bounded length and without a list of all documents."""

    type = "WRITER"
    name = "tokens"

    def __init__(self, folder: Path, tokenizer: Path, bos: str, eos: str) -> None:
        super().__init__()
        self._folder = folder
        self._tokenizer = tokenizer
        self._markers = (bos, eos)

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        tokenizer = _open(self._tokenizer)
        dtype = token_dtype(tokenizer.get_vocab_size())
        bos, eos = (np.array([tokenizer.token_to_id(marker)], dtype) for marker in self._markers)
        with TokenFileWriter(self._folder / f"{rank:05d}_tokens", dtype) as writer:
            for batch in batches(data, DOCUMENTS_PER_BATCH, CHARACTERS_PER_BATCH):
                ids = encode(tokenizer, [document.text for document in batch], dtype)
                sizes = np.fromiter(map(len, ids), np.int32, len(ids)) + np.int32(2)
                writer.write_many(np.concatenate([part for one in ids for part in (bos, one, eos)]), sizes)
                yield from batch


@lru_cache(maxsize=1)
def _open(path: Path) -> Tokenizer:
    """A stored tokenizer, opened once per process: opening one for each task takes time, and memory that the
    library does not give back."""
    tokenizer = open_tokenizer(path)
    tokenizer.encode_special_tokens = True
    return tokenizer


class CorpusTasks(NamedTuple):
    """The tasks of a source."""

    source: SourceSpec
    process: CorpusSource
    tasks: dict[str, list[str]]  # files of each task, by the key of its unit
    tokenizer: Path
    bos: str
    eos: str
    folder: Path  # local scratch
    scores: tuple[StoredScores, ...] = ()  # scores that filters need

    def pipeline(self) -> tuple[SourceReader | TokenReader, list[ScoreColumn], Selection, PipelineStep]:
        """The steps of a task: reader, columns of scores, selection, writer."""
        files = list(self.tasks.values())
        filters = with_thresholds(self.process.filters, self.scores)
        process = self.process.model_copy(update={"filters": filters})
        selection = Selection(process, self.folder, self._tokens_of)
        if self.source.format in TOKENISED:
            assert not needs_text(self.process), "the pipeline refuses it"
            text = self.tokenizer, self.bos, self.eos
            reader = TokenReader(self.source, files, *text, self.folder, selection.reject)
            return reader, [], selection, TokenWriter(self.folder, *text)
        source = with_columns(self.source, self.process.columns())
        writer = DocumentTokeniser(self.folder, self.tokenizer, self.bos, self.eos)
        columns = [ScoreColumn(scores, files) for scores in self.scores]
        return SourceReader(source, files, selection.reject), columns, selection, writer

    def _tokens_of(self, text: str) -> int:
        """The number of tokens of a text, with its begin- and end-of-document token."""
        return 2 + sum(map(len, encode(_open(self.tokenizer), [text], np.dtype(np.int64))))

    def run(self, key: str) -> Result:
        """Runs one task in this process: its files are `tokens.bin`, `tokens.idx`, and those of
        `Selection`."""
        rank = list(self.tasks).index(key)
        reader, columns, selection, writer = self.pipeline()
        documents: DocumentsPipeline = None
        for step in (reader, *columns, selection, writer):
            documents = step(documents, rank, len(self.tasks))
        deque(documents, maxlen=0)
        prefix = f"{rank:05d}_"
        files = {path.name.removeprefix(prefix): path for path in self.folder.glob(f"{prefix}*")}
        counts = {"records": selection.records, "tokenised": selection.tokenised}
        return Result(files, _read_counts(reader) | counts)


def with_columns(source: SourceSpec, columns: list[str]) -> SourceSpec:
    """The source, with the columns that filters need added to those that are read."""
    if source.format not in TABLES:
        return source
    return source.model_copy(update={"metadata": sorted({*source.metadata, *columns})})


def _read_counts(reader: PipelineStep) -> dict[str, dict[str, int]]:
    """Totals of one task: documents, bytes and characters that were read, and rejections by reason."""
    stats = reader.stats.stats
    rejected = {
        name.removeprefix("rejected_"): int(value.total)
        for name, value in stats.items()
        if name.startswith("rejected_")
    }
    read = {
        "documents": int(stats["doc_len"].n),
        "bytes": int(stats["bytes"].total),
        "characters": int(stats["doc_len"].total),
    }
    return {"read": read, "rejected": rejected}
