"""Tokenised sources (Megatron's `.bin/.idx`) as datatrove steps: a reader, and the writer of a task's token
file.

Invariants:
- Tokens are used unchanged. A SourceError or a TokenFileError names a file with a tokenizer other than the
  corpus's, ids beyond its vocabulary, documents that do not begin or end as the spec says, or an index that
  does not fit its `.bin`.
- The text of a document, which decides its order and its split, is decoded from its tokens: a document has
  the same order and split whether its source is text or tokens.
- Memory is bounded by one document and the index of one file; files that are not on a local disk are copied
  to scratch one at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

import numpy as np
from datatrove.data import Document, DocumentsPipeline
from datatrove.pipeline.base import PipelineStep
from fsspec.implementations.local import LocalFileSystem
from numpy.typing import NDArray
from tokenizers import Tokenizer

from apertus_model.data.documents.readers import open_source
from apertus_model.data.tokens.megatron import TokenFile, TokenFileWriter, token_dtype
from apertus_model.tokenizer_files import open_tokenizer
from infra.store.inputs import SourceError
from specs.sources import SourceSpec

TOKENS = "token_ids"
"""The metadata of a Document that hold its ids between the markers: shape (n,), in the file's dtype."""


class TokenReader(PipelineStep):
    """A reader of the documents of a task's `.bin/.idx` pairs. Stats are those of `SourceReader`, with the
    rejections `empty` and `marker_inside`.

    Args:
        tasks: files of each task, `.bin` and `.idx`; a pair belongs to the task that has its `.bin`.
        tokenizer: tokenizer.json of the corpus. bos, eos: its begin- and end-of-document token.
        folder: scratch, for copies.
        on_reject: called with the identifier of each rejected document and the reason.

    Raises:
        SourceError: when the tokenizer is not the one that the source states.
    """

    type = "READER"
    name = "tokens"

    def __init__(
        self,
        source: SourceSpec,
        tasks: list[list[str]],
        tokenizer: Path,
        bos: str,
        eos: str,
        folder: Path,
        on_reject: Callable[[str, str], None] = lambda document, reason: None,
    ) -> None:
        super().__init__()
        assert source.tokenizer is not None, "the spec asks for it"
        digest = hashlib.sha256(tokenizer.read_bytes()).hexdigest()
        if source.tokenizer != "trusted" and not digest.startswith(source.tokenizer.removeprefix("sha256:")):
            raise SourceError(
                f"the tokens of {source.url} are of tokenizer {source.tokenizer}, the corpus's is"
                f" sha256:{digest}. Fix: use its tokenizer"
            )
        self._source = source
        self._tasks = tasks
        self._tokenizer = tokenizer
        self._markers = (bos, eos)
        self._folder = folder
        self._on_reject = on_reject

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        tokenizer, vocab_size, bos, eos = _open(self._tokenizer, self._markers)
        left = self._source.limit
        for path in self._pairs(rank):
            for index, ids in enumerate(self._documents(path, vocab_size, bos, eos)):
                if left == 0:
                    return
                if not ids.size or ((ids == bos) | (ids == eos)).any():
                    reason = "marker_inside" if ids.size else "empty"
                    self.stat_update(f"rejected_{reason}")
                    self._on_reject(f"{path}/{index}", reason)
                    continue
                text = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
                document = Document(text, f"{path}/{index}", metadata={TOKENS: ids})
                self.update_doc_stats(document)
                self.stat_update("bytes", value=len(text.encode()))
                left = None if left is None else left - 1
                yield document

    def _pairs(self, rank: int) -> list[str]:
        """The `.bin` of each pair of a task. SourceError for a file without its counterpart: a corpus
        depends on both."""
        everything = {path for task in self._tasks for path in task}
        if "" in everything:
            raise SourceError(
                f"{self._source.url} is one file; a .bin and its .idx are needed. Fix: name their folder,"
                " choose by include"
            )
        for path in self._tasks[rank]:
            other = {".bin": ".idx", ".idx": ".bin"}.get(PurePosixPath(path).suffix)
            if other is None:
                raise SourceError(
                    f"'{path}' of {self._source.url} is neither .bin nor .idx."
                    " Fix: correct the include globs of the source"
                )
            if str(PurePosixPath(path).with_suffix(other)) not in everything:
                raise SourceError(
                    f"there is no {other} beside '{path}' of {self._source.url}."
                    " Fix: correct the globs of the source, or the file"
                )
        return [path for path in self._tasks[rank] if path.endswith(".bin")]

    def _documents(self, path: str, vocab_size: int, bos: int, eos: int) -> Iterator[NDArray[np.integer]]:
        """The ids of each document, without its markers."""
        fs, root = open_source(self._source)
        full = f"{root}/{path}"
        has_begin, has_end = self._source.markers == "both", self._source.markers != "none"
        copies = [] if isinstance(fs, LocalFileSystem) else self._copy(full)
        try:
            file = TokenFile(copies[0] if copies else full, vocab_size=vocab_size)
            file.verify()
            for index in range(file.documents):
                ids = file.document(index)
                if ids.size and (ids[0] == bos, ids[-1] == eos) != (has_begin, has_end):
                    raise SourceError(
                        f"document {index} of '{full}' begins with token {ids[0]} and ends with {ids[-1]};"
                        f" the begin- and end-of-document tokens are {bos} and {eos}, and the source says"
                        f" that there are: {self._source.markers}. Fix: markers"
                    )
                yield ids[int(has_begin) : ids.size - int(has_end)]
        except OSError as error:
            raise SourceError(f"cannot read '{full}': {type(error).__name__}: {error}") from error
        finally:
            for copy in copies:
                copy.unlink(missing_ok=True)

    def _copy(self, full: str) -> list[Path]:
        """Copies a pair to local scratch."""
        fs, _ = open_source(self._source)
        copies = [
            self._folder / f"{hashlib.sha256(full.encode()).hexdigest()[:16]}{suffix}"
            for suffix in (".bin", ".idx")
        ]
        try:
            for copy in copies:
                fs.get_file(full.removesuffix(".bin") + copy.suffix, str(copy))
        except OSError as error:
            raise SourceError(
                f"cannot read '{full}' and its .idx: {type(error).__name__}: {error}"
            ) from error
        return copies


class TokenWriter(PipelineStep):
    """A step that writes `begin tokens end` for each document to `<folder>/<rank>_tokens.bin/.idx`."""

    type = "WRITER"
    name = "tokens"

    def __init__(self, folder: Path, tokenizer: Path, bos: str, eos: str) -> None:
        super().__init__()
        self._folder = folder
        self._tokenizer = tokenizer
        self._markers = (bos, eos)

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        _, vocab_size, bos, eos = _open(self._tokenizer, self._markers)
        with TokenFileWriter(self._folder / f"{rank:05d}_tokens", token_dtype(vocab_size)) as writer:
            for document in data:
                writer.write(np.concatenate([[bos], document.metadata[TOKENS], [eos]]))
                yield document


def _open(path: Path, markers: tuple[str, str]) -> tuple[Tokenizer, int, int, int]:
    """A tokenizer, one more than its highest id, and the ids of its begin- and end-of-document token."""
    tokenizer = open_tokenizer(path)
    bos, eos = (tokenizer.token_to_id(marker) for marker in markers)
    assert bos is not None and eos is not None, "the tokenizer stage states both tokens"
    return tokenizer, 1 + max(tokenizer.get_vocab().values()), bos, eos
