"""The tasks of a corpus, which read, select and tokenise documents of texts or token files (`.bin/.idx`).

Invariants:
- The output of a task depends on its files, which it reads in order, and on the spec, not on other tasks.
- Text that spells a special token (`</s>` in a web page) is encoded as text: the pipeline alone marks
  borders.
- Texts of any length are encoded in bounded memory: the tokenizers library takes some 130 bytes for each byte
  of text that it encodes at once. A text of at most PIECE characters is encoded whole. A longer one is cut
  where words end, at places where the AROUND characters on both sides have the same tokens whether encoded
  together or apart; so its tokens are those of the whole text.
- If none of the next TRIES ends of words is such a place, or the next PIECE characters contain no end of a
  word, the text is cut after PIECE characters: in a word of that length, or for a tokenizer that marks where
  texts begin. Its tokens are then those of the pieces.
- Tokens of token files are used unchanged. A SourceError or a TokenFileError names a file with a tokenizer
  other than the corpus's, ids beyond its vocabulary, documents that do not begin or end as the spec says, or
  an index that does not fit its `.bin`. The text of such a document, which decides its order and its split,
  is decoded from its tokens, so they are the same for text and for tokens. Memory is bounded by one document
  and the index of one file; remote ones are copied to scratch one at a time.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path, PurePosixPath

import numpy as np
from datatrove.data import Document
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem
from loguru import logger
from numpy.typing import NDArray
from tokenizers import Tokenizer

from apertus_model.data.corpora.scored import stored_scores, with_scores, with_thresholds
from apertus_model.data.corpora.selection import DocumentSelection
from apertus_model.data.corpora.state import CorpusState
from apertus_model.data.documents.parsed import Rejection, batches
from apertus_model.data.documents.readers import open_source, source_documents
from apertus_model.data.tokens.megatron import TokenFile, TokenFileWriter, token_dtype
from apertus_model.tokenizer_files import open_tokenizer
from apertus_model.work.units import Result
from infra.store import Artifact
from infra.store.inputs import SourceError
from specs.sources import TABLES, TOKENISED, SourceSpec
from specs.stages.corpus import needs_text

DOCUMENTS_PER_BATCH = 1000
CHARACTERS_PER_BATCH = 2**20

logger.disable("datatrove")  # it would write a line for every file


class CorpusTasks:
    """The tasks of a source. `tasks`: the files of each, by the key of its unit. The tokenizer is opened once
    for all: opening one takes time, and memory that the library does not give back."""

    def __init__(self, state: CorpusState, tasks: dict[str, list[str]]) -> None:
        self.source, self.tasks = state.part.source, tasks
        self.scores = stored_scores(state.attempt, state.steps)
        filters = with_thresholds(state.steps, self.scores)
        self.process = state.part.process.model_copy(update={"filters": filters})
        self.vocabulary = Vocabulary(state.tokenizer)
        self.folder = state.attempt.workdir / "tasks"
        self.folder.mkdir(exist_ok=True)

    def run(self, key: str) -> Result:
        """Runs one task: its files are `tokens.bin`, `tokens.idx`, and those of `DocumentSelection`."""
        selection = DocumentSelection(self.process, self.folder, self._tokens_of)
        prefix = str(self.folder / f"{key}_")
        selected = selection.run(self._documents(key), prefix)
        with TokenFileWriter(f"{prefix}tokens", token_dtype(self.vocabulary.size)) as writer:
            self._write(selected, writer)
        files = {path.name.removeprefix(f"{key}_"): path for path in self.folder.glob(f"{key}_*")}
        counts = {"read": dict(selection.read), "rejected": dict(selection.rejected)}
        records = selection.read["documents"] + selection.rejected.total()
        return Result(files, {**counts, "records": records, "tokenised": selection.tokenised})

    def _documents(self, key: str) -> Iterator[Document | Rejection]:
        """The documents of a task, with the columns that filters need."""
        files = list(self.tasks.values())
        number = list(self.tasks).index(key)
        if self.source.format in TOKENISED:
            assert not needs_text(self.process), "the pipeline refuses it"
            return read_tokens(self.source, files, number, self.vocabulary, self.folder)
        source = self.source
        if source.format in TABLES:
            columns = sorted({*source.metadata, *self.process.columns()})
            source = source.model_copy(update={"metadata": columns})
        documents = read_texts(source, files[number])
        for scores in self.scores:
            documents = with_scores(documents, scores.of_task(files, number))
        return documents

    def _write(self, documents: Iterator[Document], writer: TokenFileWriter) -> None:
        """Writes `bos document eos` for each document, with no special token inside a document. The output is
        that of datatrove's Megatron writer, made in batches of bounded length."""
        bos, eos = (np.array([marker], writer.dtype) for marker in (self.vocabulary.bos, self.vocabulary.eos))
        if self.source.format in TOKENISED:
            for document in documents:
                writer.write(np.concatenate([bos, document.metadata[TOKENS], eos]))
            return
        for batch in batches(documents, DOCUMENTS_PER_BATCH, CHARACTERS_PER_BATCH):
            texts = [document.text for document in batch]
            ids = encode(self.vocabulary.tokenizer, texts, writer.dtype)
            sizes = np.fromiter(map(len, ids), np.int32, len(ids)) + np.int32(2)
            writer.write_many(np.concatenate([part for own in ids for part in (bos, own, eos)]), sizes)

    def _tokens_of(self, text: str) -> int:
        """The number of tokens of a text, with its begin- and end-of-document token."""
        return 2 + sum(map(len, encode(self.vocabulary.tokenizer, [text], np.dtype(np.int64))))


def read_texts(source: SourceSpec, files: Sequence[str]) -> Iterator[Document | Rejection]:
    """The documents and rejections of files of any text format, up to the limit of the source. Their metadata
    are the columns that `source.metadata` names (for a web archive, `url` and `date`); an identifier is that
    of the source, or `<file>/<position in the file>`."""
    left = source.limit
    for path in files:
        for name, index, document in source_documents(source, [path]):
            if isinstance(document, Rejection) or not document.text:
                reason = document.reason if isinstance(document, Rejection) else "empty"
                yield Rejection(reason, f"{name}/{index}")
                continue
            if left == 0:
                return
            left = None if left is None else left - 1
            identifier = f"{name}/{index}" if document.id is None else document.id
            yield Document(document.text, identifier, metadata=dict(document.metadata))
        if left == 0:
            return


PIECE = 2**20
AROUND = 256
TRIES = 64
_END_OF_WORD = re.compile(r"(?<=\w)(?=\W)")


def encode(tokenizer: Tokenizer, texts: Sequence[str], dtype: np.dtype) -> list[NDArray[np.integer]]:
    """The ids of each text, (n,) of `dtype`, without special tokens at its ends."""
    if all(len(text) <= PIECE for text in texts):
        return _ids(tokenizer, texts, dtype)
    parts = ([_ids(tokenizer, [piece], dtype)[0] for piece in pieces(tokenizer, text)] for text in texts)
    return list(map(np.concatenate, parts))


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
        both, first, other = _ids(tokenizer, [before + after, before, after], np.dtype(np.int64))
        if np.array_equal(both, np.concatenate([first, other])):
            return end
    return least


def _ids(tokenizer: Tokenizer, texts: Sequence[str], dtype: np.dtype) -> list[NDArray[np.integer]]:
    encoded = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    return [np.array(encoding.ids, dtype) for encoding in encoded]


TOKENS = "token_ids"
"""The metadata of a Document that hold its ids between the markers: shape (n,), in the file's dtype."""


class Vocabulary:
    """A stored tokenizer, which encodes special tokens as text, and its ids; `size`: the highest and one."""

    def __init__(self, stored: Artifact) -> None:
        self.file = stored.local("tokenizer.json")
        self.tokenizer = open_tokenizer(self.file)
        self.tokenizer.encode_special_tokens = True
        self.size = 1 + max(self.tokenizer.get_vocab().values())
        self.bos: int = stored.manifest.facts["bos_id"]
        self.eos: int = stored.manifest.facts["eos_id"]


def read_tokens(
    source: SourceSpec, tasks: list[list[str]], number: int, vocabulary: Vocabulary, folder: Path
) -> Iterator[Document | Rejection]:
    """The documents and the rejections (`empty`, `marker_inside`) of the `.bin/.idx` pairs of task `number`,
    up to the limit of the source. A pair belongs to the task that has its `.bin`; `folder`: scratch, for
    copies. SourceError when the tokenizer is not the one that the source states."""
    assert source.tokenizer is not None, "the spec asks for it"
    digest = hashlib.sha256(vocabulary.file.read_bytes()).hexdigest()
    if source.tokenizer != "trusted" and not digest.startswith(source.tokenizer.removeprefix("sha256:")):
        raise SourceError(
            f"the tokens of {source.url} are of tokenizer {source.tokenizer}, the corpus's is"
            f" sha256:{digest}. Fix: use its tokenizer"
        )
    left = source.limit
    for path in _pairs(source, tasks, number):
        for index, ids in enumerate(_ids_of_documents(source, path, vocabulary, folder)):
            if left == 0:
                return
            if not ids.size or np.isin(ids, (vocabulary.bos, vocabulary.eos)).any():
                yield Rejection("marker_inside" if ids.size else "empty", f"{path}/{index}")
                continue
            left = None if left is None else left - 1
            text = vocabulary.tokenizer.decode(ids.tolist(), skip_special_tokens=False)
            yield Document(text, f"{path}/{index}", metadata={TOKENS: ids})


def _pairs(source: SourceSpec, tasks: list[list[str]], number: int) -> list[str]:
    """The `.bin` of each pair of a task. SourceError for a file without its counterpart."""
    every_file = {path for task in tasks for path in task}
    if "" in every_file:
        raise SourceError(
            f"{source.url} is one file; a .bin and its .idx are needed. Fix: name their folder,"
            " choose by include"
        )
    for path in tasks[number]:
        other = {".bin": ".idx", ".idx": ".bin"}.get(PurePosixPath(path).suffix)
        if other is None:
            raise SourceError(
                f"'{path}' of {source.url} is neither .bin nor .idx."
                " Fix: correct the include globs of the source"
            )
        if str(PurePosixPath(path).with_suffix(other)) not in every_file:
            raise SourceError(
                f"there is no {other} beside '{path}' of {source.url}."
                " Fix: correct the globs of the source, or the file"
            )
    return [path for path in tasks[number] if path.endswith(".bin")]


def _ids_of_documents(
    source: SourceSpec, path: str, vocabulary: Vocabulary, folder: Path
) -> Iterator[NDArray[np.integer]]:
    """The ids of each document of a pair, without its markers."""
    fs, root = open_source(source)
    full = f"{root}/{path}"
    has_begin, has_end = source.markers == "both", source.markers != "none"
    copies = [] if isinstance(fs, LocalFileSystem) else _copy(fs, full, folder)
    try:
        file = TokenFile(copies[0] if copies else full, vocab_size=vocabulary.size)
        file.verify()
        for index in range(file.documents):
            ids = file.document(index)
            marked = ids.size and (ids[0] == vocabulary.bos, ids[-1] == vocabulary.eos)
            if ids.size and marked != (has_begin, has_end):
                raise SourceError(
                    f"document {index} of '{full}' begins with token {ids[0]} and ends with {ids[-1]};"
                    f" the begin- and end-of-document tokens are {vocabulary.bos} and {vocabulary.eos}, and"
                    f" the source says that there are: {source.markers}. Fix: markers"
                )
            yield ids[int(has_begin) : ids.size - int(has_end)]
    except OSError as error:
        raise SourceError(f"cannot read '{full}': {type(error).__name__}: {error}") from error
    finally:
        for copy in copies:
            copy.unlink(missing_ok=True)


def _copy(fs: AbstractFileSystem, full: str, folder: Path) -> list[Path]:
    name = hashlib.sha256(full.encode()).hexdigest()[:16]
    copies = [folder / f"{name}{suffix}" for suffix in (".bin", ".idx")]
    try:
        for copy in copies:
            fs.get_file(full.removesuffix(".bin") + copy.suffix, str(copy))
    except OSError as error:
        raise SourceError(f"cannot read '{full}' and its .idx: {type(error).__name__}: {error}") from error
    return copies
