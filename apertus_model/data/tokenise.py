"""One restartable task of a corpus.

Invariant: what a task writes depends on its files and on the spec: not on the number of workers, not on the order in which tasks run, not
on the other tasks. Text that spells a special token (`</s>` in a web page) is encoded as text: only the pipeline marks borders of
documents.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from datatrove.data import DocumentsPipeline
from datatrove.executor.local import LocalPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.filters.base_filter import BaseFilter
from datatrove.pipeline.formatters.pii import PIIFormatter
from datatrove.pipeline.tokens.megatron_tokenizer import MegatronDocumentTokenizer
from datatrove.utils.tokenization import load_tokenizer
from loguru import logger
from tokenizers.processors import TemplateProcessing

from apertus_model.data.filters import make_filter
from apertus_model.data.readers import SourceReader
from apertus_model.data.tokenised import TokenReader, TokenWriter
from specs.sources import TOKENISED, SourceSpec
from specs.stages.corpus import CorpusSource, needs_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

EMAIL_PLACEHOLDER = "<email-pii>"
IP_PLACEHOLDER = "<ip-pii>"
DOCUMENTS_PER_BATCH = 1000


class TaskResult(NamedTuple):
    """Files that a task wrote (`tokens.bin`, `tokens.idx`, `hashes.npy`) and what it counted."""

    files: dict[str, Path]
    counts: dict[str, dict[str, int]]


class ContentHash(PipelineStep):
    """Passes documents on, and at the end writes one 64-bit hash of each one's text, in order: `<folder>/<rank>_hashes.npy`, uint64."""

    type = "HASH"
    name = "content"

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        hashes: list[int] = []
        for document in data:
            hashes.append(int.from_bytes(hashlib.blake2b(document.text.encode(), digest_size=8).digest(), "little"))
            yield document
        np.save(self._folder / f"{rank:05d}_hashes.npy", np.array(hashes, dtype="<u8"))


class DocumentTokeniser(MegatronDocumentTokenizer):
    """datatrove's Megatron writer, with `bos document eos` for each document and no special token inside one."""

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
    """Everything that a worker needs to know. `tasks`: the files of each task; `folder`: a local scratch folder."""

    source: SourceSpec
    process: CorpusSource
    tasks: list[list[str]]
    tokenizer: Path
    bos: str
    eos: str
    folder: Path

    def pipeline(self) -> list[PipelineStep]:
        if self.source.format in TOKENISED:
            assert not needs_text(self.process), "the pipeline refuses it"
            reader = TokenReader(self.source, self.tasks, self.tokenizer, self.bos, self.eos, self.folder)
            return [reader, ContentHash(self.folder), TokenWriter(self.folder, self.tokenizer, self.bos, self.eos)]
        steps: list[PipelineStep] = [SourceReader(self.source, self.tasks)]
        steps += [make_filter(spec) for spec in self.process.filters]
        if self.process.pii:
            steps.append(PIIFormatter(email_replacement=EMAIL_PLACEHOLDER, ip_replacement=IP_PLACEHOLDER))
        steps.append(ContentHash(self.folder))
        steps.append(DocumentTokeniser(self.folder, self.tokenizer, self.bos, self.eos))
        return steps

    def run(self, rank: int) -> TaskResult:
        """Runs one task in this process. datatrove's log goes to `<folder>/logs`, and nowhere else."""
        steps = self.pipeline()
        executor = LocalPipelineExecutor(steps, tasks=len(self.tasks), workers=1, logging_dir=str(self.folder), skip_completed=False)
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
            try:
                # A local rank other than 0 is quiet.
                executor._run_for_rank(rank, local_rank=1)
            finally:
                logger.remove()
        prefix = self.folder / f"{rank:05d}"
        files = {name: Path(f"{prefix}_{name}") for name in ("tokens.bin", "tokens.idx", "hashes.npy")}
        return TaskResult(files, _counts(steps))


def _counts(steps: list[PipelineStep]) -> dict[str, dict[str, int]]:
    """Totals of one task: documents and bytes that were read, rejections by reason, drops by filter."""
    reader = steps[0].stats.stats
    rejected: dict[str, int] = {}
    dropped: dict[str, int] = {}
    for label, value in reader.items():
        if label.startswith("rejected_"):
            rejected[label.removeprefix("rejected_")] = int(value.total)
    for step in steps:
        if isinstance(step, BaseFilter):
            dropped[step.name] = dropped.get(step.name, 0) + int(step.stats["dropped"].total)
    read = {"documents": int(reader["doc_len"].n), "bytes": int(reader["bytes"].total), "characters": int(reader["doc_len"].total)}
    return {"read": read, "rejected": rejected, "dropped": dropped}
