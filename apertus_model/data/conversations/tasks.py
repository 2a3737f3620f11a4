"""The tasks of a `conversations` stage: each judges, renders and tokenises the conversations of some files.

Invariant: a task reads only its files; its output depends neither on other tasks nor on the number of
workers. Records, tokens, lines and compared values are in the same order. A conversation that a filter drops
before the first step over the whole source is only a row of `rejects.parquet`; one that a filter drops after
such a step has a record, no tokens, and a line with its id, its URL and the reason.
"""

from __future__ import annotations

import json
from collections import Counter
from itertools import chain
from typing import Any

import numpy as np
from datatrove.data import Document
from numpy.typing import NDArray

from apertus_model.chat.encoder import ChatEncoder
from apertus_model.chat.messages import ConversationError
from apertus_model.data.conversations.readers import read_conversations
from apertus_model.data.conversations.selection import HASHES, buckets_of
from apertus_model.data.conversations.stored import Conversation
from apertus_model.data.conversations.text import TEXTS, messages_of, without_personal_data
from apertus_model.data.corpora.duplicates import text_hash
from apertus_model.data.corpora.filters import limited_to
from apertus_model.data.corpora.pii import Replacer
from apertus_model.data.corpora.records import Removed, rejects_writer, signature_column, url_of
from apertus_model.data.corpora.scored import stored_scores, with_thresholds
from apertus_model.data.corpora.selection import DocumentJudge, Judged, global_steps
from apertus_model.data.documents.parsed import Rejection
from apertus_model.data.documents.readers import files_of_tasks, open_source
from apertus_model.data.tokens.megatron import TokenFileWriter, token_dtype
from apertus_model.data.tokens.packing import complete_array
from apertus_model.tokenizer_files import open_tokenizer
from apertus_model.work.units import Result
from infra.store import Attempt
from specs.filters import NearDuplicatesFilter, labels
from specs.stages.conversations import ConversationsPart

DROPPED = "dropped"
REJECTED = "rejected"
SHARD_FILES = ("tokens.bin", "tokens.idx", "masks.npy", "lines.jsonl")
"""The files of a task that make a `Shard`."""


def record_type(kinds: int) -> np.dtype[Any]:
    """The type of the record of a conversation that reached the first step over the whole source, or the end.
    `kinds`: number of kinds of personal data."""
    return np.dtype(
        [
            ("content", "<u8", 2),  # hash of the content as stored
            ("read", "<u8", 2),  # hashes of content and line as read
            ("group", "<u8"),  # hash of seed and group
            ("place", "<u8"),  # hash of seed and content as stored
            ("hashes", HASHES),
            ("step", "<i2"),  # the step that dropped it in its task, or the number of steps
            ("replaced", "<u4", (kinds,)),  # replacements by kind
        ]
    )


class ConversationTasks:
    """The tasks of a source. The data of a unit are its counts."""

    def __init__(self, attempt: Attempt) -> None:
        part = ConversationsPart.model_validate(attempt.job.spec)
        self.source, self.process, self.seed = part.source, part.process, part.seed
        self.units = files_of_tasks(part, "shard")  # files of each task, by key
        tokenizer = attempt.input_artifact("tokenizer")
        self.tokenizer = tokenizer.local("tokenizer.json")
        self.vocab_size: int = tokenizer.manifest.facts["vocab_size"]
        self.scores = stored_scores(attempt, part.process.filters)
        self.folder = attempt.workdir / "tasks"
        self.folder.mkdir(exist_ok=True)

    def run(self, key: str) -> Result:
        """Reads, judges, renders and tokenises the conversations of one task, up to the source's limit."""
        fs, root = open_source(self.source)
        files = (read_conversations(self.source, fs, root, path) for path in self.units[key])
        with _TaskWriter(self, key) as writer:
            for conversation in chain.from_iterable(files):
                if isinstance(conversation, Rejection):
                    writer.reject(*conversation)
                    continue
                try:
                    writer.add(conversation)
                except ConversationError as error:
                    writer.reject(error.reason, conversation.id, str(error))
                if writer.normal == self.source.limit:
                    break
        return Result(writer.files, dict(writer.counts))


class _TaskWriter:
    def __init__(self, tasks: ConversationTasks, key: str) -> None:
        self._seed = tasks.seed
        self._filters = with_thresholds(tasks.process.filters, tasks.scores)
        self._labels = labels(self._filters)
        self._judge = DocumentJudge(self._filters, tasks.folder)
        number, files = list(tasks.units).index(key), list(tasks.units.values())
        self._scores = [scores.of_task(files, number) for scores in tasks.scores]
        self._replacer = Replacer(tasks.process.replaced)
        self._replaces = limited_to(tasks.process.replaced_only)
        self._encoder = ChatEncoder(open_tokenizer(tasks.tokenizer))
        self._records: list[tuple[Any, ...]] = []
        self._compared: dict[int, list[NDArray[np.uint64]]] = {
            step: [] for step in global_steps(self._filters)
        }
        names = [*SHARD_FILES, "index.npy", "rejects.parquet"]
        names += [f"compared-{step}.npy" for step in self._compared]
        self.files = {name: tasks.folder / f"{key}_{name}" for name in names}
        self.counts: Counter[str] = Counter()
        self.normal = 0  # conversations in normal form, including those that the template cannot render
        prefix = str(self.files["tokens.bin"]).removesuffix(".bin")
        self._tokens = TokenFileWriter(prefix, token_dtype(tasks.vocab_size))
        self._mask_values = self.files["masks.npy"].with_suffix(".bin")
        self._masks = self._mask_values.open("wb")
        self._lines = self.files["lines.jsonl"].open("wb")
        self._rejects = rejects_writer(self.files["rejects.parquet"])

    def add(self, conversation: Conversation) -> None:
        """Adds a conversation, kept or dropped. ConversationError for a malformed one."""
        messages = messages_of(conversation)
        self.normal += 1
        texts = {of: text(messages) for of, text in TEXTS.items()}
        hashes = {of: text_hash(text) for of, text in texts.items()}
        document = Document(text="", id=conversation.id, metadata=dict(conversation.metadata))
        for scores in self._scores:
            digest = hashes[self._filters[scores.step].of]
            document.metadata[scores.column] = scores.score(digest, conversation.id)
        judged = self._judge(document, texts)
        if judged.drop is not None and not any(step < judged.step for step in self._compared):
            label, url = self._labels[judged.step], url_of(conversation.metadata)
            self.counts[f"{DROPPED}/{label}"] += 1
            self._rejects.add(
                Removed(hashes["conversation"], conversation.id, url, label, judged.drop.reason)
            )
            return
        self._write(conversation, judged, self._replaces(document.metadata), hashes)
        for step, values in self._compared.items():
            values.append(self._values(step, judged, hashes))

    def reject(self, reason: str, name: str, problem: str) -> None:
        """Counts a malformed conversation or row."""
        self.counts[f"{REJECTED}/{reason}"] += 1
        shown = f"{reason}: {problem}" if problem else reason
        shown = shown.encode(errors="backslashreplace").decode()
        self._rejects.add(Removed(0, name, None, REJECTED, shown))

    def _values(self, step: int, judged: Judged, hashes: dict[str, int]) -> NDArray[np.uint64]:
        """(buckets,): what a step over the whole source compares; zeros for a conversation dropped before."""
        spec = self._filters[step]
        if step > judged.step:
            return np.zeros(buckets_of(spec), np.uint64)
        if isinstance(spec, NearDuplicatesFilter):
            return judged.signatures[spec.of, signature_column(spec)]
        return np.array([hashes[spec.of]], np.uint64)

    def _write(
        self, conversation: Conversation, judged: Judged, replaces: bool, hashes: dict[str, int]
    ) -> None:
        original = text_hash(conversation.content()), text_hash(conversation.to_json())
        replaced = (0,) * len(self._replacer.kinds)
        if judged.drop is None:
            if replaces:
                conversation, replaced = without_personal_data(conversation, self._replacer)
            encoded = self._encoder.encode(conversation.messages, conversation.tools)
            self._tokens.write(encoded.tokens)
            self._masks.write(encoded.mask.tobytes())
            self._lines.write(conversation.to_json().encode() + b"\n")
        else:
            self._tokens.write([])
            known = {"id": conversation.id, "metadata": {"url": url_of(conversation.metadata)}}
            self._lines.write(json.dumps(known | {"reason": judged.drop.reason}).encode() + b"\n")
        content = conversation.content()
        stored = text_hash(content), text_hash(content, b"2")
        place = text_hash(f"{self._seed}\n{content}", b"place")
        group = text_hash(f"{self._seed}\n{conversation.group}")
        own = hashes["conversation"], hashes["answer"]
        self._records.append((stored, original, group, place, own, judged.step, replaced))

    def __enter__(self) -> _TaskWriter:
        return self

    def __exit__(self, *error: Any) -> None:
        self._rejects.__exit__(*error)
        self._masks.close()
        self._lines.close()
        self._tokens.close()
        if error[0] is not None:
            return
        complete_array(self._mask_values, self.files["masks.npy"], np.dtype(np.uint8))
        kinds = len(self._replacer.kinds)
        np.save(self.files["index.npy"], np.array(self._records, record_type(kinds)))
        for step, values in self._compared.items():
            shape = len(values), buckets_of(self._filters[step])
            by_bucket = np.array(values, np.uint64).reshape(shape).T
            np.save(self.files[f"compared-{step}.npy"], np.ascontiguousarray(by_bucket))
