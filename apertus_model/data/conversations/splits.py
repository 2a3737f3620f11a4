"""Writes the files of the artifact of a `conversations` stage from the results of its tasks.

Invariants:
- The files are a function of the *set* of conversations, of the seed and of the spec. Conversations are
  sorted by the hash of their content; of those with the same content the one with the smallest hash of the
  whole line is kept. Rejects are sorted by the hash of their text.
- Conversations of one group are on the same side.
"""

import json
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from apertus_model.chat.encoder import TRAINED
from apertus_model.data.conversations.selection import KEPT, ComparedValues, chosen, kept_name, resolve
from apertus_model.data.conversations.stored import Shard
from apertus_model.data.conversations.tasks import SHARD_FILES
from apertus_model.data.corpora.records import Removed, read_rejects, rejects_writer, url_of
from apertus_model.data.corpora.verdicts import is_held_out
from apertus_model.data.documents.readers import check_holdout
from apertus_model.data.tokens.megatron import TokenFileWriter, token_dtype
from infra.store import Artifact
from specs.errors import counted
from specs.filters import NearDuplicatesFilter, labels
from specs.stages.conversations import ConversationSource

SHARD_TOKENS = 2**26
REJECTS_PER_FILE = 2**20
ORDER = ("hash", "id", "url", "filter", "reason")
"""The columns by which the rows of the table of rejects are sorted."""


@dataclass(frozen=True)
class WrittenSplit:
    shards: list[str]  # file names without suffix
    conversations: int
    tokens: int
    trained_tokens: int
    shortest: int  # tokens of the shortest conversation; 0 if there is none
    shortest_prompt: int  # the fewest tokens before the first one that the assistant writes


def _prompt(mask: NDArray[np.uint8]) -> int:
    """The tokens of a conversation before the first one that the assistant writes."""
    return next(iter(np.flatnonzero(mask == TRAINED).tolist()), mask.size)


class AllConversations:
    """The kept conversations of all tasks, in the order of the hashes of their contents. Numbers of records:
    `passed` (by all filters), `dropped` (by filters over the whole source and later ones, by label),
    `duplicates` (of content), `not_chosen` (by `share` or `count`); `replaced`: of personal data in the kept
    ones, by kind."""

    def __init__(
        self,
        tasks: Sequence[dict[str, Path]],
        vocab_size: int,
        process: ConversationSource | None = None,
        seen: dict[int, list[Artifact]] | None = None,
    ) -> None:
        """`seen`: the artifacts under `not_in`, by step."""
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a task has six files open
        self._files = tasks
        self._tasks = [Shard([files[name] for name in SHARD_FILES], vocab_size) for files in tasks]
        self._vocab_size = vocab_size
        self._process = process or ConversationSource()
        self._filters = self._process.filters
        self._compared = ComparedValues(self._filters, tasks, seen or {})
        records = [np.load(files["index.npy"], allow_pickle=False) for files in tasks]
        self._records = np.concatenate(records)
        sizes = list(map(len, records))
        self._task = np.repeat(np.arange(len(sizes)), sizes)
        self._place = np.concatenate([np.arange(size) for size in sizes])
        by_read = np.lexsort(self._records["read"].T[::-1])
        self._resolution = resolve(self._filters, self._records["step"], by_read, self._compared)
        self.dropped = self._resolution.dropped
        kept, self._equal = self._each_once()
        self.duplicates = len(self._equal)
        picked = chosen(self._process, self._records["place"][kept], self._records["content"][kept, 0])
        self._not_chosen = kept[~picked]
        self.not_chosen = len(self._not_chosen)
        self._kept = kept[picked]
        self._group = self._records["group"][self._kept]
        self.replaced: list[int] = self._records["replaced"][self._kept].sum(0, dtype=np.int64).tolist()

    def _each_once(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The first record of each content among those that pass all filters, in the order of the hashes of
        their contents; and the other records, each with the first of its content, (others, 2)."""
        passed = np.flatnonzero(self._resolution.alive)
        self.passed = len(passed)
        first, second = self._records["content"][passed].T
        order = np.lexsort((self._records["read"][passed, 1], second, first))
        new = np.ones(len(order), dtype=bool)
        new[1:] = (np.diff(first[order]) != 0) | (np.diff(second[order]) != 0)
        ordered = passed[order]
        firsts = ordered[new]
        return firsts, np.stack([ordered[~new], firsts[np.cumsum(new)[~new] - 1]], axis=1)

    def __len__(self) -> int:
        return len(self._kept)

    def held_out(self, share: float) -> NDArray[np.bool_]:
        """(conversations,): whether each is held out. SourceError as `check_holdout` says."""
        mask = is_held_out(self._group, share)
        count, groups = int(mask.sum()), len(np.unique(self._group))
        usual = ConversationSource.model_fields["holdout"].default
        least = int(self._group.min()) if groups > 1 else None
        check_holdout(share, usual, count, len(self), f"{counted(groups, 'group')} of conversations", least)
        return mask

    def write(
        self, name: str, chosen: NDArray[np.int64], folder: Path, shard_tokens: int = SHARD_TOKENS
    ) -> WrittenSplit:
        """Writes the `chosen` conversations in shards of about `shard_tokens` tokens."""
        shards: list[str] = []
        tokens = trained = position = 0
        shortest: list[int] = []
        prompts: list[int] = []
        while position < len(chosen):
            shards.append(f"{name}-{len(shards):05d}")
            masks: list[NDArray[np.uint8]] = []
            size = 0
            prefix = folder / shards[-1]
            with (
                TokenFileWriter(prefix, token_dtype(self._vocab_size)) as writer,
                Path(f"{prefix}.jsonl").open("wb") as lines,
            ):
                while position < len(chosen) and size < shard_tokens:
                    task, place = self._at(self._kept[chosen[position]])
                    writer.write(task.tokens[place])
                    lines.write(task.line(place))
                    masks.append(task.mask[task.tokens.place(place)])
                    size += masks[-1].size
                    position += 1
            shortest.append(min(map(len, masks)))
            prompts.append(min(map(_prompt, masks)))
            mask = np.concatenate(masks)
            np.save(f"{prefix}.mask.npy", mask)
            tokens += size
            trained += int((mask == TRAINED).sum())
        return WrittenSplit(
            shards, len(chosen), tokens, trained, min(shortest, default=0), min(prompts, default=0)
        )

    def write_kept(self, folder: Path) -> tuple[list[str], dict[str, str]]:
        """Writes the values by which other parts compare the kept conversations, in their order:
        `kept.npy` for `exact-duplicates`, and a file (buckets, conversations) for each step of
        `near-duplicates`. Returns the names of all files, and those of the steps by `kept_name`."""
        np.save(folder / KEPT, self._records["hashes"][self._kept])
        compared: dict[str, str] = {}
        for step, spec in enumerate(self._filters):
            if isinstance(spec, NearDuplicatesFilter) and (key := kept_name(spec)) not in compared:
                compared[key] = f"kept-{step}.npy"
                values = np.array([bucket[self._kept] for bucket in self._compared.own(step)])
                np.save(folder / compared[key], values)
        return [KEPT, *compared.values()], compared

    def write_rejects(self, folder: Path) -> list[str]:
        """Writes the table of rejects, in files of `REJECTS_PER_FILE` rows. Returns their names."""
        scratch = folder / "removed.parquet"
        with rejects_writer(scratch) as writer:
            for row in self._removed():
                writer.add(row)
        files = [*(task["rejects.parquet"] for task in self._files), scratch]
        tables = list(map(read_rejects, files))
        scratch.unlink()
        table = pa.concat_tables(tables).sort_by([(name, "ascending") for name in ORDER])
        names: list[str] = []
        for start in range(0, len(table), REJECTS_PER_FILE):
            names.append(f"rejects-{len(names):05d}.parquet")
            pq.write_table(table.slice(start, REJECTS_PER_FILE), folder / names[-1], compression="zstd")
        return names

    def _removed(self) -> Iterator[Removed]:
        """The rows of the table of rejects for the records that are not kept."""
        names = labels(self._filters)
        for record in np.flatnonzero(~self._resolution.alive).tolist():
            step, group = int(self._resolution.gone[record]), int(self._resolution.group[record])
            label = names[step if step >= 0 else int(self._records["step"][record])]
            yield self._row(record, label, "" if step < 0 else _alike(group))
        for record, first in self._equal.tolist():
            same = f"the same content as {self._line(first)['id']}, which stays"
            yield self._row(record, "duplicates", same)
        share, count = self._process.share, self._process.count
        for record in self._not_chosen.tolist():
            place = int(self._records["place"][record]) / 2**64
            rule = f"below {share}" if share is not None else f"one of the {count} smallest"
            drawn = f"drawn at {place:.9f}; required: {rule}"
            yield self._row(record, "count" if share is None else "share", drawn)

    def _row(self, record: int, label: str, reason: str) -> Removed:
        """The row of a record in the table of rejects; an empty `reason` stands for that of its task."""
        line, text = self._line(record), int(self._records["hashes"]["conversation"][record])
        return Removed(text, line["id"], url_of(line["metadata"]), label, reason or line["reason"])

    def _line(self, record: int) -> dict[str, Any]:
        task, place = self._at(record)
        return json.loads(task.line(place))

    def _at(self, record: int | np.int64) -> tuple[Shard, int]:
        return self._tasks[self._task[record]], int(self._place[record])


def _alike(group: int) -> str:
    if not group:
        return "like one that a part under not_in keeps; required: like none"
    return f"one of {group} alike; required: the one with the smallest hash"
