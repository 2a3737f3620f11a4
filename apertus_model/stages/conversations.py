"""The `conversations` stage: one source becomes dialogues, split into training and held-out ones, rendered and tokenised.

Artifact, for each shard `train-*` and `validation-*`: `.bin/.idx` (Megatron tokens, one document per
conversation), `.mask.npy` (uint8, one per token: 1 where it is trained, 2 for outputs of tools, else 0) and
`.jsonl` (the conversations). `ConversationShards` reads them.

Invariants:
- Work is restartable by task (`files_per_task` files each), as in the `corpus` stage. The bytes of the artifact depend neither on the split
  into tasks nor on the number of workers.
- Every conversation is accounted for: read = rejected + duplicates + train + validation.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from apertus_model.data.conversation_tasks import AllConversations, ConversationTasks, WrittenSplit
from apertus_model.data.conversations import SHARD_SUFFIXES
from apertus_model.data.executors import commit_tasks
from apertus_model.progress import Progress
from apertus_model.stop import StopSignal
from infra.store import Artifact, Attempt, StoreError
from infra.store.inputs import SourceError, list_source
from specs.job import Job
from specs.launch import Launch
from specs.stages.conversations import ConversationsPart

FACTS = ("vocab_size", "bos_id", "eos_id", "pad_id", "end_of_turn_id")


def run(job: Job, attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Runs the stage. SourceError for a source that cannot be read or holds too little, ChatError for a tokenizer without chat tokens."""
    part = ConversationsPart.model_validate(job.spec)
    tokenizer = Artifact(attempt.store, job.inputs["tokenizer"].path or "")
    facts = tokenizer.manifest.facts
    listing = part.listing or [file.path for file in list_source(part.source).files]
    # A source with a limit is one task: only that can count its conversations.
    step = len(listing) if part.source.limit else part.files_per_task
    spans = [(start, min(start + step, len(listing))) for start in range(0, len(listing), step)]
    folder = attempt.workdir / "tasks"
    folder.mkdir(exist_ok=True)
    files = [listing[start:stop_] for start, stop_ in spans]
    work = ConversationTasks(part.source, files, tokenizer.local("tokenizer.json"), facts["vocab_size"], part.seed, folder)

    keys = [f"conversations-{start:08d}-{stop_:08d}" for start, stop_ in spans]
    commit_tasks(work, keys, attempt, Launch.model_validate(job.launch), stop, progress)

    counts: Counter[str] = Counter()
    tasks = []
    for key in keys:
        unit = attempt.unit(key)
        if unit is None:
            raise StoreError(f"unit {key} of {job.path} was committed and is gone; run the stage again")
        counts.update(unit.data)
        tasks.append(attempt.unit_files(key, unit))
    conversations = AllConversations(tasks, facts["vocab_size"])
    rejected = {name.removeprefix("rejected/"): counts[name] for name in sorted(counts) if name.startswith("rejected/")}
    story = f"{sum(counts.values())} conversations read"
    story += f", rejected: {', '.join(f'{count} {name}' for name, count in rejected.items())}" if rejected else ""
    if not len(conversations):
        raise SourceError(f"no conversation of {part.source.url} is left: {story}. Fix: the globs, the format or the rows")
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
            "tasks": len(keys),
            **{name: _metrics(split) for name, split in splits.items()},
        },
        facts={
            "tokenizer": job.inputs["tokenizer"].fingerprint,
            **{name: facts.get(name) for name in FACTS},
            **{name: split.shards for name, split in splits.items()},
        },
    )


def _metrics(split: WrittenSplit) -> dict[str, int]:
    return {"conversations": split.conversations, "tokens": split.tokens, "trained_tokens": split.trained_tokens}


def _shown(splits: dict[str, WrittenSplit]) -> str:
    return ", ".join(
        f"{name}: {split.conversations} conversations of {split.tokens} tokens ({split.trained_tokens} trained)"
        for name, split in splits.items()
    )
