"""The `conversations` stage: turns one source into dialogues that are filtered, split into training and
held-out ones, rendered and tokenised.

Artifact, for each shard `train-*` and `validation-*`: `.bin/.idx` (Megatron tokens, one document per
conversation), `.mask.npy` (uint8, one per token: 1 if it is trained, 2 in tool outputs, else 0) and
`.jsonl` (the conversations). `ConversationShards` reads them. Also `rejects-*.parquet`, the table of the
conversations that filters removed, and `kept*.npy`, with which other parts find duplicates of the kept ones.

Invariants:
- Work is restartable by task (`files_per_task` files each), as in the `corpus` stage. The bytes of the
  artifact depend neither on the split into tasks nor on the number of workers.
- Every conversation is accounted for: read = rejected + dropped + duplicates + not chosen + train +
  validation.
"""

from collections import Counter

import numpy as np

from apertus_model.data.conversations.splits import AllConversations, WrittenSplit
from apertus_model.data.conversations.stored import SHARD_SUFFIXES
from apertus_model.data.conversations.tasks import DROPPED, REJECTED
from apertus_model.data.conversations.tasks import ConversationTasks as Units
from apertus_model.data.corpora.records import read_line, read_rejects
from apertus_model.data.corpora.selection import not_in
from apertus_model.data.documents.parsed import fix_of
from apertus_model.progress import Progress
from apertus_model.stop import StopSignal
from apertus_model.work import run_units
from infra.store import Attempt
from infra.store.inputs import SourceError
from specs.filters import labels
from specs.stages.conversations import ConversationsPart

FACTS = ("vocab_size", "bos_id", "eos_id", "pad_id", "end_of_turn_id")
COUNTED = ("conversations", "tokens", "trained_tokens", "shortest", "shortest_prompt")


def run(attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Runs the stage. SourceError for a source that cannot be read or holds too little, ChatError for a
    tokenizer without chat tokens."""
    part = ConversationsPart.model_validate(attempt.job.spec)
    facts = attempt.input_artifact("tokenizer").manifest.facts
    tasks = run_units(Units(attempt), attempt, stop, progress, processes=part.WORKERS)
    conversations = AllConversations(
        [task.files for task in tasks],
        facts["vocab_size"],
        part.process,
        not_in(attempt, part.process.filters),
    )
    rejected, dropped = Counter[str](), Counter(conversations.dropped)
    for task in tasks:
        for name, number in task.data.items():
            group, _, reason = name.partition("/")
            (dropped if group == DROPPED else rejected)[reason] += number
    total = rejected.total() + dropped.total() + conversations.passed
    summary = read_line(f"{total} conversations", rejected, dropped)
    if not len(conversations):
        rows = (row for task in tasks for row in read_rejects(task.files["rejects.parquet"]).to_pylist())
        first = next((f"; the first is {row['reason']}" for row in rows if row["filter"] == REJECTED), "")
        fix = fix_of(rejected | dropped, "check the globs, the format, the rows or the filters")
        raise SourceError(f"no conversation of {part.source.url} is left: {summary}{first}. Fix: {fix}")
    if part.process.count is not None and not conversations.not_chosen:
        progress.log(f"count is {part.process.count}, and there are {len(conversations)}: all are kept")
    held_out = conversations.held_out(part.process.holdout)
    if not held_out.any():
        progress.log(f"holdout {part.process.holdout} holds out none of {len(conversations)} conversations")
    splits = {
        "train": conversations.write("train", np.flatnonzero(~held_out), attempt.workdir),
        "validation": conversations.write("validation", np.flatnonzero(held_out), attempt.workdir),
    }
    kept, compared = conversations.write_kept(attempt.workdir)
    shards = [shard for split in splits.values() for shard in split.shards]
    for name in [
        *(f"{shard}{suffix}" for shard in shards for suffix in SHARD_SUFFIXES),
        *conversations.write_rejects(attempt.workdir),
        *kept,
    ]:
        attempt.put(attempt.workdir / name, name)
        (attempt.workdir / name).unlink()
    left_out = f", {conversations.not_chosen} not chosen" if conversations.not_chosen else ""
    progress.log(f"{summary}, {conversations.duplicates} duplicates{left_out}; {_shown(splits)}")
    attempt.commit(
        metrics={
            "conversations": len(conversations),
            "tokens": sum(split.tokens for split in splits.values()),
            "read": {"conversations": total},
            "rejected": dict(sorted(rejected.items())),
            "filters": labels(part.process.filters),
            "dropped": dict(dropped),
            "duplicates": conversations.duplicates,
            "not_chosen": conversations.not_chosen,
            "replaced": dict(zip(part.process.replaced, conversations.replaced, strict=True)),
            "tasks": len(tasks),
            **{name: {what: getattr(split, what) for what in COUNTED} for name, split in splits.items()},
        },
        facts={
            "tokenizer": attempt.job.inputs["tokenizer"].fingerprint,
            **{name: facts.get(name) for name in FACTS},
            **{name: split.shards for name, split in splits.items()},
            "compared": compared,
        },
    )


def _shown(splits: dict[str, WrittenSplit]) -> str:
    return ", ".join(
        f"{name}: {split.conversations} conversations of {split.tokens} tokens ({split.trained_tokens}"
        " trained)"
        for name, split in splits.items()
    )
