"""From the files of a source to the splits of a `conversations` artifact.

Invariants:
- A task reads only its files; its output depends neither on other tasks nor on the number of workers.
- The splits are a function of the *set* of conversations, of the seed and of the held-out share:
  conversations are sorted by content hash, and of those with the same content the one with the smallest hash
  of the whole line is kept.
- Conversations of one group are on the same side.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from apertus_model.chat.encoder import TRAINED, ChatEncoder
from apertus_model.chat.messages import ConversationError
from apertus_model.data.conversation_readers import read_conversations
from apertus_model.data.documents import Rejection, open_source
from apertus_model.data.megatron import TokenFile, TokenFileWriter, token_dtype
from apertus_model.work.units import Result
from infra.store.inputs import SourceError
from specs.sources import SourceSpec

SHARD_TOKENS = 2**26
TASK_FILES = ("tokens.bin", "tokens.idx", "masks.bin", "lines.jsonl", "index.npy")
_INDEX = np.dtype([("content", "<u8", 2), ("line", "<u8"), ("group", "<u8"), ("bytes", "<i8")])


class ConversationTasks(NamedTuple):
    """The tasks of a source."""

    source: SourceSpec
    tasks: dict[str, list[str]]  # files of each task, by the key of its unit
    tokenizer: Path
    vocab_size: int
    seed: int
    folder: Path  # local scratch

    @property
    def keys(self) -> list[str]:
        return list(self.tasks)

    def run(self, key: str) -> Result:
        """Reads, renders and tokenises the conversations of one task, up to the limit of the source."""
        fs, root = open_source(self.source)
        encoder = ChatEncoder(Tokenizer.from_file(str(self.tokenizer)))
        files = {name: self.folder / f"{key}_{name}" for name in TASK_FILES}
        rejected: Counter[str] = Counter()
        index: list[tuple[tuple[int, int], int, int, int]] = []
        with (
            TokenFileWriter(
                str(files["tokens.bin"]).removesuffix(".bin"), token_dtype(self.vocab_size)
            ) as tokens,
            files["masks.bin"].open("wb") as masks,
            files["lines.jsonl"].open("wb") as lines,
        ):
            found = (
                item for path in self.tasks[key] for item in read_conversations(self.source, fs, root, path)
            )
            for conversation in found:
                if isinstance(conversation, Rejection):
                    rejected[conversation.reason] += 1
                    continue
                try:
                    encoded = encoder.encode(conversation.messages, conversation.tools)
                except ConversationError as error:
                    rejected[error.reason] += 1
                    continue
                line = conversation.to_json().encode() + b"\n"
                tokens.write(encoded.tokens)
                masks.write(encoded.mask.tobytes())
                lines.write(line)
                content = conversation.content().encode()
                group = _hash(f"{self.seed}\n{conversation.group}".encode())
                index.append(((_hash(content), _hash(content, b"2")), _hash(line), group, len(line)))
                if len(index) == self.source.limit:
                    break
        np.save(files["index.npy"], np.array(index, dtype=_INDEX))
        return Result(
            files, {"kept": len(index), **{f"rejected/{name}": count for name, count in rejected.items()}}
        )


def _hash(data: bytes, person: bytes = b"") -> int:
    return int.from_bytes(blake2b(data, digest_size=8, person=person).digest(), "little")


class _Task:
    """The files of one committed task."""

    def __init__(self, files: dict[str, Path], vocab_size: int) -> None:
        self.tokens = TokenFile(files["tokens.bin"], files["tokens.idx"], vocab_size=vocab_size)
        self.index = np.load(files["index.npy"], allow_pickle=False)
        if len(self.index) != len(self.tokens):
            raise ValueError(
                f"{files['tokens.bin']} has {len(self.tokens)} conversations, its index {len(self.index)}"
            )
        self.mask = _mapped(files["masks.bin"])
        self.lines = _mapped(files["lines.jsonl"])
        self.token_starts = np.concatenate([[0], np.cumsum(self.tokens.sizes, dtype=np.int64)])
        self.line_starts = np.concatenate([[0], np.cumsum(self.index["bytes"])])


def _mapped(path: Path) -> NDArray[np.uint8]:
    if not path.stat().st_size:
        return np.empty(0, dtype=np.uint8)
    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)


@dataclass(frozen=True)
class WrittenSplit:
    """One written split."""

    shards: list[str]  # file names without suffix
    conversations: int
    tokens: int
    trained_tokens: int


class AllConversations:
    """The conversations of all tasks, in the order of their contents, each content once.

    Attributes:
        duplicates: number of conversations left out because another has the same content.
    """

    def __init__(self, tasks: Sequence[dict[str, Path]], vocab_size: int) -> None:
        self._tasks = [_Task(files, vocab_size) for files in tasks]
        self._vocab_size = vocab_size
        index = np.concatenate([task.index for task in self._tasks])
        first, second = index["content"].T
        order = np.lexsort((index["line"], second, first))
        new = np.ones(len(order), dtype=bool)
        new[1:] = (np.diff(first[order]) != 0) | (np.diff(second[order]) != 0)
        chosen = order[new]
        self.duplicates = len(order) - len(chosen)
        sizes = [len(task.index) for task in self._tasks]
        self._task = np.repeat(np.arange(len(sizes)), sizes)[chosen]
        self._place = np.concatenate([np.arange(size) for size in sizes])[chosen]
        self._group = index["group"][chosen]

    def __len__(self) -> int:
        return len(self._group)

    def held_out(self, share: float) -> NDArray[np.bool_]:
        """(conversations,): whether each is held out. SourceError when one of the two splits would be
        empty."""
        mask = self._group < np.uint64(min(int(share * 2**64), 2**64 - 1))
        count, groups = int(mask.sum()), len(np.unique(self._group))
        if 0 < count < len(self):
            return mask
        if groups < 2:
            left = f"{len(self)} conversations are left, of {groups} groups"
            raise SourceError(f"{left}; training and held-out split need one group each")
        if count:
            raise SourceError(
                f"holdout {share} holds out all {groups} groups. Fix: a smaller share or more conversations"
            )
        least = (int(self._group.min()) + 1) / 2**64
        raise SourceError(
            f"holdout {share} of {groups} groups of conversations holds out none. Fix: more of them, or a"
            f" share of {least:.4f} or more"
        )

    def write(
        self, name: str, chosen: NDArray[np.int64], folder: Path, shard_tokens: int = SHARD_TOKENS
    ) -> WrittenSplit:
        """Writes the `chosen` conversations in shards of about `shard_tokens` tokens."""
        shards: list[str] = []
        tokens = trained = position = 0
        while position < len(chosen):
            shards.append(f"{name}-{len(shards):05d}")
            masks: list[NDArray[np.uint8]] = []
            size = 0
            prefix = folder / shards[-1]
            text = prefix.with_name(f"{prefix.name}.jsonl")
            with TokenFileWriter(prefix, token_dtype(self._vocab_size)) as writer, text.open("wb") as lines:
                while position < len(chosen) and size < shard_tokens:
                    task, place = (
                        self._tasks[self._task[chosen[position]]],
                        int(self._place[chosen[position]]),
                    )
                    writer.write(task.tokens[place])
                    lines.write(task.lines[task.line_starts[place] : task.line_starts[place + 1]].tobytes())
                    masks.append(task.mask[task.token_starts[place] : task.token_starts[place + 1]])
                    size += masks[-1].size
                    position += 1
            mask = np.concatenate(masks)
            np.save(prefix.with_name(f"{prefix.name}.mask.npy"), mask)
            tokens += size
            trained += int((mask == TRAINED).sum())
        return WrittenSplit(shards, len(chosen), tokens, trained)
