"""One restartable task of a corpus.

Invariant: the output of a task depends on its files and on the spec: not on the number of workers, the order
of tasks or other tasks. Text that spells a special token (`</s>` in a web page) is encoded as text: only the
pipeline marks document boundaries.
"""

from __future__ import annotations

import contextlib
import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.tokens.megatron_tokenizer import MegatronDocumentTokenizer
from datatrove.utils.tokenization import load_tokenizer
from loguru import logger
from tokenizers.processors import TemplateProcessing

from apertus_model.data.readers import SourceReader
from apertus_model.data.scored import ScoreColumn, StoredScores, with_thresholds
from apertus_model.data.selection import Selection
from apertus_model.data.tokenised import TokenReader, TokenWriter
from apertus_model.work.units import Result
from specs.sources import TABLES, TOKENISED, SourceSpec
from specs.stages.corpus import CorpusSource, needs_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

DOCUMENTS_PER_BATCH = 1000


class DocumentTokeniser(MegatronDocumentTokenizer):
    """datatrove's Megatron writer, with `bos document eos` for each document and no special token inside
    one."""

    def __init__(self, folder: Path, tokenizer: Path, bos: str, eos: str) -> None:
        super().__init__(str(folder), tokenizer_name_or_path=str(tokenizer), batch_size=DOCUMENTS_PER_BATCH)
        self._bos = bos
        self._eos = eos

    @cached_property
    def tokenizer(self) -> Tokenizer:
        tokenizer = load_tokenizer(self.tokenizer_name_or_path)
        tokenizer.encode_special_tokens = True
        tokenizer.post_processor = TemplateProcessing(
            single=f"{self._bos} $A {self._eos}",
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in (self._bos, self._eos)],
        )
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
    scores: tuple[StoredScores, ...] = ()  # that filters need

    @property
    def keys(self) -> list[str]:
        return list(self.tasks)

    def pipeline(self) -> list[PipelineStep]:
        """Reader, selection, writer."""
        files = list(self.tasks.values())
        if self.source.format in TOKENISED:
            assert not needs_text(self.process), "the pipeline refuses it"
            return [
                TokenReader(self.source, files, self.tokenizer, self.bos, self.eos, self.folder),
                Selection(self.process, self.folder),
                TokenWriter(self.folder, self.tokenizer, self.bos, self.eos),
            ]
        return [
            SourceReader(with_columns(self.source, self.process.columns()), files),
            *(ScoreColumn(scores, files) for scores in self.scores),
            Selection(with_thresholds(self.process, self.scores), self.folder),
            DocumentTokeniser(self.folder, self.tokenizer, self.bos, self.eos),
        ]

    def run(self, key: str) -> Result:
        """Runs one task in this process: its files are `tokens.bin`, `tokens.idx`, and those of `Selection`.
        datatrove's log goes to `<folder>/logs`, and nowhere else."""
        rank = self.keys.index(key)
        steps = self.pipeline()
        reader = steps[0]
        [selection] = [step for step in steps if isinstance(step, Selection)]
        executor = LocalPipelineExecutor(
            steps, tasks=len(self.tasks), workers=1, logging_dir=str(self.folder), skip_completed=False
        )
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
            try:
                # A local rank other than 0 is quiet.
                executor._run_for_rank(rank, local_rank=1)
            finally:
                logger.remove()
        prefix = f"{rank:05d}_"
        files = {path.name.removeprefix(prefix): path for path in self.folder.glob(f"{prefix}*")}
        return Result(files, _read_counts(reader) | selection.counts)


def with_columns(source: SourceSpec, columns: list[str]) -> SourceSpec:
    """The source, with the columns that filters need among those that are read."""
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
