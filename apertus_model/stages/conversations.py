"""The `conversations` stage: one source becomes dialogues, split into training and held-out ones, rendered
and tokenised.

Artifact, for each shard `train-*` and `validation-*`: `.bin/.idx` (Megatron tokens, one document per
conversation), `.mask.npy` (uint8, one per token: 1 where it is trained, 2 for outputs of tools, else 0) and
`.jsonl` (the conversations). `ConversationShards` reads them.

Invariants:
- Work is restartable by task (`files_per_task` files each), as in the `corpus` stage. The bytes of the
  artifact depend neither on the split into tasks nor on the number of workers.
- Every conversation is accounted for: read = rejected + duplicates + train + validation.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from apertus_model.data.conversation_tasks import AllConversations, ConversationTasks, WrittenSplit
from apertus_model.data.conversations import SHARD_SUFFIXES
from apertus_model.data.documents import files_of_tasks
from apertus_model.progress import Progress
from apertus_model.stop import StopSignal
from apertus_model.work import run_units
from infra.store import Attempt
from infra.store.inputs import SourceError
from specs.job import Job
from specs.stages.conversations import ConversationsPart

FACTS = ("vocab_size", "bos_id", "eos_id", "pad_id", "end_of_turn_id")


def run(job: Job, attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Runs the stage. SourceError for a source that cannot be read or holds too little, ChatError for a
    tokenizer without chat tokens."""
    part = ConversationsPart.model_validate(job.spec)
    facts = attempt.input_artifact("tokenizer").manifest.facts
    tasks = run_units(work_of(job, attempt), attempt, stop, progress, processes=part.WORKERS)
    counts: Counter[str] = Counter()
    for task in tasks:
        counts.update(task.data)
    conversations = AllConversations([task.files for task in tasks], facts["vocab_size"])
    rejected = {
        name.removeprefix("rejected/"): counts[name]
        for name in sorted(counts)
        if name.startswith("rejected/")
    }
    story = f"{sum(counts.values())} conversations read"
    story += (
        f", rejected: {', '.join(f'{count} {name}' for name, count in rejected.items())}" if rejected else ""
    )
    if not len(conversations):
        raise SourceError(
            f"no conversation of {part.source.url} is left: {story}. Fix: the globs, the format or the rows"
        )
    held_out = conversations.held_out(part.process.holdout)
    splits = {
        "train": conversations.write("train", np.flatnonzero(~held_out), attempt.workdir),
        "validation": conversations.write("validation", np.flatnonzero(held_out), attempt.workdir),
    }
    for split in splits.values():
        for name in (f"{shard}{suffix}" for shard in split.shards for suffix in SHARD_SUFFIXES):
            attempt.put(attempt.workdir / name, name)
            (attempt.workdir / name).unlink()
    progress.log(f"{story}, {conversations.duplicates} duplicates; {_shown(splits)}")
    attempt.commit(
        metrics={
            "conversations": len(conversations),
            "tokens": sum(split.tokens for split in splits.values()),
            "read": {"conversations": sum(counts.values())},
            "rejected": rejected,
            "duplicates": conversations.duplicates,
            "tasks": len(tasks),
            **{name: _metrics(split) for name, split in splits.items()},
        },
        facts={
            "tokenizer": job.inputs["tokenizer"].fingerprint,
            **{name: facts.get(name) for name in FACTS},
            **{name: split.shards for name, split in splits.items()},
        },
    )


def work_of(job: Job, attempt: Attempt) -> ConversationTasks:
    """The tasks; a unit's data are its counts."""
    part = ConversationsPart.model_validate(job.spec)
    tokenizer = attempt.input_artifact("tokenizer")
    size = tokenizer.manifest.facts["vocab_size"]
    folder = attempt.workdir / "tasks"
    folder.mkdir(exist_ok=True)
    files = files_of_tasks(part, "conversations")
    return ConversationTasks(part.source, files, tokenizer.local("tokenizer.json"), size, part.seed, folder)


def _metrics(split: WrittenSplit) -> dict[str, int]:
    return {
        "conversations": split.conversations,
        "tokens": split.tokens,
        "trained_tokens": split.trained_tokens,
    }


def _shown(splits: dict[str, WrittenSplit]) -> str:
    return ", ".join(
        f"{name}: {split.conversations} conversations of {split.tokens} tokens ({split.trained_tokens}"
        " trained)"
        for name, split in splits.items()
    )
