"""The tasks of a `conversations` stage, each of which judges, renders and tokenises the conversations of some
files.

Invariant: a task reads only its files; its output depends neither on other tasks nor on the number of
workers. Records, tokens, lines and compared values are in the same order. A conversation that a filter drops
before the first step over the whole source is only a row of `rejects.parquet`; one that a filter drops after
such a step has a record, no tokens, and a line with its id, its URL and the reason.
"""

from __future__ import annotations

import json
from collections import Counter
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from apertus_model.chat.encoder import ChatEncoder
from apertus_model.chat.messages import ConversationError
from apertus_model.data.conversations.readers import read_conversations
from apertus_model.data.conversations.selection import HASHES, Judge, Judged
from apertus_model.data.conversations.stored import Conversation
from apertus_model.data.conversations.text import PersonalData, messages_of
from apertus_model.data.corpora.filters import Drop, limited_to
from apertus_model.data.corpora.pii import Replacer
from apertus_model.data.corpora.rejects import RejectsWriter, Removed, url_of
from apertus_model.data.corpora.scored import StoredScores, with_thresholds
from apertus_model.data.documents.readers import Rejection, open_source
from apertus_model.data.tokens.megatron import TokenFileWriter, token_dtype
from apertus_model.tokenizer_files import open_tokenizer
from apertus_model.work.units import Result
from specs.filters import labels
from specs.sources import SourceSpec
from specs.stages.conversations import ConversationSource

DROPPED = "dropped"
REJECTED = "rejected"


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
            ("bytes", "<i8"),  # of its line in `lines.jsonl`
            ("step", "<i2"),  # the step that dropped it in its task, or the number of steps
            ("replaced", "<u4", (kinds,)),  # replacements by kind
        ]
    )


class ConversationTasks(NamedTuple):
    """The tasks of a source."""

    source: SourceSpec
    process: ConversationSource
    tasks: dict[str, list[str]]  # files of each task, by the key of its unit
    tokenizer: Path
    vocab_size: int
    seed: int
    folder: Path  # local scratch
    scores: tuple[StoredScores, ...] = ()  # those that filters need

    @property
    def keys(self) -> list[str]:
        return list(self.tasks)

    def run(self, key: str) -> Result:
        """Reads, judges, renders and tokenises the conversations of one task, up to the limit of the
        source."""
        fs, root = open_source(self.source)
        found = (item for path in self.tasks[key] for item in read_conversations(self.source, fs, root, path))
        with _TaskWriter(self, key) as writer:
            for conversation in found:
                if isinstance(conversation, Rejection):
                    writer.reject(*conversation)
                    continue
                try:
                    writer.add(conversation)
                except ConversationError as error:
                    writer.reject(error.reason, conversation.id, str(error))
                if writer.read == self.source.limit:
                    break
        return Result(writer.files, dict(writer.counts))


class _TaskWriter:
    """Writes the files of one task."""

    def __init__(self, tasks: ConversationTasks, key: str) -> None:
        filters = tasks.process.filters
        self._seed = tasks.seed
        self._labels = labels(filters)
        number = list(tasks.tasks).index(key)
        self._judge = Judge(
            with_thresholds(filters, tasks.scores),
            tasks.folder,
            [scores.of_task(list(tasks.tasks.values()), number) for scores in tasks.scores],
        )
        self._replacer = Replacer(tasks.process.replaced)
        self._replaces = limited_to(tasks.process.replaced_only)
        self._without_personal_data = PersonalData(self._replacer)
        self._encoder = ChatEncoder(open_tokenizer(tasks.tokenizer))
        self._records: list[tuple[Any, ...]] = []
        self._compared: dict[int, list[NDArray[np.uint64]]] = {step: [] for step in self._judge.buckets}
        names = ["tokens.bin", "tokens.idx", "masks.bin", "lines.jsonl", "index.npy", "rejects.parquet"]
        names += [f"compared-{step}.npy" for step in self._compared]
        self.files = {name: tasks.folder / f"{key}_{name}" for name in names}
        self.counts: Counter[str] = Counter()
        self.read = 0  # conversations in normal form, including those that the template cannot render
        prefix = str(self.files["tokens.bin"]).removesuffix(".bin")
        self._tokens = TokenFileWriter(prefix, token_dtype(tasks.vocab_size))
        self._masks = self.files["masks.bin"].open("wb")
        self._lines = self.files["lines.jsonl"].open("wb")
        self._rejects = RejectsWriter(self.files["rejects.parquet"])

    def add(self, conversation: Conversation) -> None:
        """Adds a conversation, kept or dropped. ConversationError for a malformed one."""
        messages = messages_of(conversation)
        self.read += 1
        judged = self._judge(conversation.id, messages, conversation.metadata)
        if judged.drop is not None and not judged.compared:
            label, url = self._labels[judged.step], url_of(conversation.metadata)
            self.counts[f"{DROPPED}/{label}"] += 1
            removed = Removed(judged.hashes[0], conversation.id, url, label, _reason(judged.drop))
            self._rejects.add(removed)
        else:
            self._write(conversation, judged)

    def reject(self, reason: str, name: str, found: str) -> None:
        """Counts a malformed conversation or row."""
        self.counts[f"{REJECTED}/{reason}"] += 1
        shown = f"{reason}: {found}" if found else reason
        shown = shown.encode(errors="backslashreplace").decode()
        self._rejects.add(Removed(0, name, None, REJECTED, shown))

    def _write(self, conversation: Conversation, judged: Judged) -> None:
        read = _hash(conversation.content().encode()), _hash(conversation.to_json().encode())
        replaced = (0,) * len(self._replacer.kinds)
        if judged.drop is None:
            if self._replaces(judged.columns):
                conversation, replaced = self._without_personal_data(conversation)
            encoded = self._encoder.encode(conversation.messages, conversation.tools)
            self._tokens.write(encoded.tokens)
            self._masks.write(encoded.mask.tobytes())
            line = conversation.to_json().encode() + b"\n"
        else:
            self._tokens.write([])
            known = {"id": conversation.id, "metadata": {"url": url_of(conversation.metadata)}}
            line = json.dumps(known | {"reason": _reason(judged.drop)}).encode() + b"\n"
        self._lines.write(line)
        content = conversation.content().encode()
        place = _hash(f"{self._seed}\n".encode() + content, b"place")
        group = _hash(f"{self._seed}\n{conversation.group}".encode())
        self._records.append(
            (
                *((_hash(content), _hash(content, b"2")), read, group, place),
                *(judged.hashes, len(line), judged.step, replaced),
            )
        )
        for step, values in self._compared.items():
            nothing = np.zeros(self._judge.buckets[step], np.uint64)
            values.append(judged.compared.get(step, nothing))

    def __enter__(self) -> _TaskWriter:
        return self

    def __exit__(self, *error: Any) -> None:
        self._rejects.__exit__(*error)
        self._masks.close()
        self._lines.close()
        self._tokens.close()
        np.save(
            self.files["index.npy"],
            np.array(self._records, dtype=record_type(len(self._replacer.kinds))),
        )
        for step, values in self._compared.items():
            by_bucket = np.array(values, np.uint64).reshape(len(values), self._judge.buckets[step]).T
            np.save(self.files[f"compared-{step}.npy"], np.ascontiguousarray(by_bucket))


def _reason(drop: Drop) -> str:
    return f"{drop.value}; required: {drop.rule}"


def _hash(data: bytes, person: bytes = b"") -> int:
    return int.from_bytes(blake2b(data, digest_size=8, person=person).digest(), "little")
