"""Conversations of a `conversations` artifact, as text and as tokens.

Invariant: index i is the same conversation in all views, over the shards of a split in order: the i-th
document of the token files, the i-th part of the masks and the i-th line of the `.jsonl`.
"""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apertus_model.chat.messages import Message
from apertus_model.data.tokens.megatron import TokenFile
from apertus_model.data.tokens.packing import load_array
from apertus_model.data.tokens.stream import Split
from infra.store import Artifact
from specs.errors import StageError

SHARD_SUFFIXES = (".bin", ".idx", ".mask.npy", ".jsonl")


class ConversationFileError(StageError):
    """An inconsistency between the files of a shard; the message names the files and the numbers."""


@dataclass(frozen=True)
class Conversation:
    id: str
    messages: list[Message]  # in normal form (`apertus_model.chat.messages`), the last one the assistant's
    tools: list[dict[str, Any]] | None = None
    # Alternative texts of the last message; if that message is plain text, its text is the first.
    completions: list[str] = field(default_factory=list)
    group: str = ""  # conversations of one group are in the same split
    metadata: dict[str, Any] = field(default_factory=dict)  # further columns of the source, JSON values
    # Whether the two completions are labelled: the first is preferred to the second.
    preference: bool = False

    @property
    def prompt(self) -> list[Message]:
        """All messages but the last."""
        return self.messages[:-1]

    def to_json(self) -> str:
        """The conversation as a line of JSON without its line end; `preference` is left out when false."""
        values = asdict(self)
        if not self.preference:
            del values["preference"]
        return json.dumps(values, ensure_ascii=False)

    def content(self) -> str:
        """The content by which conversations are compared: messages, tools and completions."""
        return json.dumps([self.messages, self.tools, self.completions], ensure_ascii=False)


class ConversationShards:
    """The conversations of one split. Pickled by its paths. `lengths`: (conversations,), int64: tokens of
    each. ConversationFileError when the files of a shard do not fit together."""

    def __init__(self, artifact: Artifact, split: Split) -> None:
        facts = artifact.manifest.facts
        self._shards = [
            Shard([artifact.local(f"{shard}{suffix}") for suffix in SHARD_SUFFIXES], facts["vocab_size"])
            for shard in facts[split]
        ]
        sizes = [np.asarray(shard.tokens.sizes, dtype=np.int64) for shard in self._shards]
        self.lengths: NDArray[np.int64] = np.concatenate(sizes) if sizes else np.empty(0, dtype=np.int64)
        self._starts = np.cumsum([0, *(len(size) for size in sizes)])

    def __len__(self) -> int:
        return len(self.lengths)

    def conversation(self, index: int) -> Conversation:
        shard, place = self._find(index)
        return Conversation(**json.loads(shard.line(place)))

    def tokens(self, index: int) -> NDArray[np.int64]:
        """(n,), int64: the tokens of the rendered conversation."""
        shard, place = self._find(index)
        return shard.tokens[place].astype(np.int64)

    def mask(self, index: int) -> NDArray[np.uint8]:
        """(n,), uint8: kind of each token: PROMPT, TRAINED or UNTRAINED of `apertus_model.chat.encoder`."""
        shard, place = self._find(index)
        return shard.mask[shard.tokens.place(place)]

    def _find(self, index: int) -> tuple[Shard, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"conversation {index} of {len(self)}")
        shard = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._shards[shard], index - int(self._starts[shard])


class Shard:
    """The files of one shard, in the order of `SHARD_SUFFIXES`, opened when they are needed. Pickled by its
    paths."""

    def __init__(self, paths: Sequence[Path], vocab_size: int) -> None:
        self._paths = list(paths)
        self._vocab_size = vocab_size

    def __reduce__(self) -> tuple[Any, ...]:
        return Shard, (self._paths, self._vocab_size)

    @cached_property
    def tokens(self) -> TokenFile:
        return TokenFile(self._paths[0], self._paths[1], vocab_size=self._vocab_size)

    @cached_property
    def mask(self) -> NDArray[np.uint8]:
        mask: NDArray[np.uint8] = load_array(self._paths[2])
        if mask.shape != self.tokens.tokens.shape or mask.dtype != np.uint8:
            raise ConversationFileError(
                f"{self._paths[2]} has {mask.shape} values of {mask.dtype} for"
                f" {self.tokens.tokens.size} tokens"
            )
        return mask

    @cached_property
    def _lines(self) -> tuple[mmap.mmap, NDArray[np.int64]]:
        """The mapped file, and the start of each line, with the end of the last one."""
        with self._paths[3].open("rb") as file:
            text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        # one by one: comparing all bytes at once takes as much memory as the file
        ends = np.fromiter((line.end() for line in re.finditer(b"\n", text)), np.int64)
        if len(ends) != len(self.tokens):
            raise ConversationFileError(
                f"{self._paths[3]} has {len(ends)} lines for {len(self.tokens)} conversations"
            )
        return text, np.concatenate([[0], ends])

    def line(self, place: int) -> bytes:
        """A conversation as its line of JSON, with the line end."""
        text, starts = self._lines
        return text[int(starts[place]) : int(starts[place + 1])]
