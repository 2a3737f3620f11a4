"""The restartable tasks of a corpus, which read, select and tokenise its documents.

Invariants:
- The output of a task depends on its files, which it reads in order, and on the spec; not on the number of
  workers, datatrove's sharding, the order of tasks or other tasks.
- Text that spells a special token (`</s>` in a web page) is encoded as text: only the pipeline marks document
  boundaries.
- Texts of any length are encoded in bounded memory: the tokenizers library takes some 130 bytes for each byte
  of text that it encodes at once. A text of at most PIECE characters is encoded whole. A longer one is cut
  where words end, at places where the AROUND characters on both sides have the same tokens whether encoded
  together or apart; so its tokens are those of the whole text.
- If none of the next TRIES ends of words is such a place, or the next PIECE characters contain no end of a
  word, the text is cut after PIECE characters: in a word of that length, or for a tokenizer that marks where
  texts begin. Its tokens are then those of the pieces.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
from datatrove.data import DocumentsPipeline
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.readers.base import BaseDiskReader
from loguru import logger
from numpy.typing import NDArray
from tokenizers import Tokenizer

from apertus_model.data.corpora.scored import ScoreColumn, StoredScores, with_thresholds
from apertus_model.data.corpora.selection import Selection
from apertus_model.data.corpora.tokenised import TokenReader, TokenWriter
from apertus_model.data.documents.parsed import batches
from apertus_model.data.documents.readers import Rejection, open_source, read_documents
from apertus_model.data.tokens.megatron import TokenFileWriter, token_dtype
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


class SourceReader(BaseDiskReader):
    """A reader of any text format of `SourceSpec` from any fsspec URL. Stats: `bytes`, `rejected_<reason>`,
    and datatrove's own.

    The metadata of a document are the columns that `source.metadata` names (for a web archive, `url` and
    `date`). Its identifier is the one in its source, or `<file>/<position in the file>`.

    `source.limit` bounds the documents of each task, so a source with a limit has to be a single task.
    `on_reject` is called with the identifier of each rejected document and the reason.
    """

    name = "documents"

    def __init__(
        self,
        source: SourceSpec,
        tasks: list[list[str]],
        on_reject: Callable[[str, str], None] = lambda document, reason: None,
    ) -> None:
        fs, root = open_source(source)
        super().__init__((root, fs), limit=-1 if source.limit is None else source.limit, add_file_path=False)
        self._source = source
        self._root = root
        self._fs = fs
        self._tasks = tasks
        self._on_reject = on_reject

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        for document in self.read_files_shard(self._tasks[rank]):
            self.update_doc_stats(document)
            self.stat_update("bytes", value=len(document.text.encode()))
            yield document

    def read_file(self, filepath: str) -> DocumentsPipeline:
        name = filepath or PurePosixPath(self._root).name
        for index, found in enumerate(read_documents(self._source, self._fs, self._root, filepath)):
            if isinstance(found, Rejection):
                self.stat_update(f"rejected_{found.reason}")
                self._on_reject(f"{name}/{index}", found.reason)
                continue
            identifier = {} if found.id is None else {"id": found.id}
            yield self.get_document_from_dict(
                {"text": found.text, "metadata": found.metadata, **identifier}, name, index
            )


PIECE = 2**20
AROUND = 256
TRIES = 64
_END_OF_WORD = re.compile(r"(?<=\w)(?=\W)")


def encode(tokenizer: Tokenizer, texts: Sequence[str], dtype: np.dtype) -> list[NDArray[np.integer]]:
    """The ids of each text, (n,) of `dtype`, without special tokens at its ends."""
    if all(len(text) <= PIECE for text in texts):
        return _ids(tokenizer, texts, dtype)
    return [
        np.concatenate([ids for piece in pieces(tokenizer, text) for ids in _ids(tokenizer, [piece], dtype)])
        for text in texts
    ]


def pieces(tokenizer: Tokenizer, text: str) -> Iterator[str]:
    """The parts of a text that are encoded separately."""
    start = 0
    while len(text) - start > PIECE:
        stop = _cut(tokenizer, text, start + PIECE)
        yield text[start:stop]
        start = stop
    yield text[start:]


def _cut(tokenizer: Tokenizer, text: str, least: int) -> int:
    """The position, `least` or later, at which the text is cut."""
    ends = _END_OF_WORD.finditer(text, least, least + PIECE)
    for end in (match.start() for match in islice(ends, TRIES)):
        before, after = text[end - AROUND : end], text[end : end + AROUND]
        both, one, other = _ids(tokenizer, [before + after, before, after], np.dtype(np.int64))
        if np.array_equal(both, np.concatenate([one, other])):
            return end
    return least


def _ids(tokenizer: Tokenizer, texts: Sequence[str], dtype: np.dtype) -> list[NDArray[np.integer]]:
    return [
        np.array(one.ids, dtype) for one in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    ]
