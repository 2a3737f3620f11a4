"""The `corpus` stage: one source becomes filtered, tokenised, shuffled Megatron token files.

Artifact: `train-*.bin/.idx`, `validation-*.bin/.idx`, and `probes.json` where the spec asks for memorisation probes.

Invariants:
- Work is restartable by task (`files_per_task` files each): a task is a unit of the store, and a killed stage redoes only the tasks that
  were not committed. The bytes of the artifact depend neither on the split into tasks nor on the number of workers.
- Every document and every token is accounted for: read = dropped + kept, kept = training + held out + probes.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from apertus_model.data.megatron import TokenFile
from apertus_model.data.merge import Documents, Probe, Split, SplitWriter, choose_probes, probes_json
from apertus_model.data.tokenise import CorpusTasks
from apertus_model.data.workers import run_tasks
from apertus_model.progress import Progress
from apertus_model.stop import StopSignal
from infra.store import Artifact, Attempt, StoreError
from infra.store.inputs import SourceError, list_source
from specs.job import Job
from specs.launch import Launch
from specs.stages.corpus import CorpusPart


def run(job: Job, attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Runs the stage. SourceError for a source that cannot be read, or holds too little."""
    part = CorpusPart.model_validate(job.spec)
    tokenizer = Artifact(attempt.store, job.inputs["tokenizer"].path or "")
    facts = tokenizer.manifest["facts"]
    listing = part.listing or [file.path for file in list_source(part.source).files]
    spans = _spans(len(listing), len(listing) if part.source.limit else part.files_per_task)
    folder = attempt.workdir / "tasks"
    folder.mkdir(exist_ok=True)
    work = CorpusTasks(
        part.source,
        part.process,
        [listing[start:stop_] for start, stop_ in spans],
        tokenizer.local("tokenizer.json"),
        facts["bos_token"],
        facts["eos_token"],
        folder,
    )

    keys = [f"documents-{start:08d}-{stop_:08d}" for start, stop_ in spans]
    pending = [rank for rank, key in enumerate(keys) if attempt.unit(key) is None]
    workers = Launch.model_validate(job.launch).workers or 2
    done = len(keys) - len(pending)
    progress.update(done, len(keys), "tasks")
    for rank, result in run_tasks(work, pending, workers):
        attempt.commit_unit(keys[rank], files=result.files, data=result.counts)
        for path in result.files.values():
            path.unlink()
        done += 1
        progress.update(done, len(keys), "tasks")

    units = [_committed(attempt, key) for key in keys]
    counts = _total([unit["data"] for unit in units])
    documents = Documents.open([_open_unit(attempt, key, unit, facts["vocab_size"]) for key, unit in zip(keys, units, strict=True)])
    if not len(documents):
        raise SourceError(f"no document of {part.source.url} is left: {_story(counts)}. Fix: the globs, the format or the filters")
    splits, probes = _write_splits(part, attempt, documents, facts)
    kept = sum(split.documents for split in splits.values())
    tokens = sum(split.tokens for split in splits.values())
    progress.log(f"{_story(counts)}; {len(documents)} kept, {splits['validation'].documents} of them held out, {tokens} tokens")
    attempt.commit(
        metrics={
            "documents": kept,
            "tokens": tokens,
            "tasks": len(keys),
            "probes": len(probes),
            **counts,
            **{name: {"documents": split.documents, "tokens": split.tokens} for name, split in splits.items()},
        },
        facts={
            "tokenizer": job.inputs["tokenizer"].fingerprint,
            "vocab_size": facts["vocab_size"],
            "bos_id": facts["bos_id"],
            "eos_id": facts["eos_id"],
            **{name: split.shards for name, split in splits.items()},
        },
    )


def _spans(files: int, files_per_task: int) -> list[tuple[int, int]]:
    """[start, stop) of the files of each task. A source with a limit on its documents is one task: only that can count them."""
    return [(start, min(start + files_per_task, files)) for start in range(0, files, files_per_task)]


def _write_splits(part: CorpusPart, attempt: Attempt, documents: Documents, facts: dict[str, Any]) -> tuple[dict[str, Split], list[Probe]]:
    held_out = documents.held_out(part.process.holdout)
    train, validation = np.flatnonzero(~held_out), np.flatnonzero(held_out)
    probes: list[Probe] = []
    if part.process.repeats is not None:
        probes = choose_probes(documents, train, part.process.repeats, part.seed)
        train = np.setdiff1d(train, [probe.document for probe in probes])
        attempt.write_json("probes.json", probes_json(probes, part.process.repeats.length))
    writer = SplitWriter(attempt.workdir, facts["vocab_size"], part.seed)
    splits = {
        "train": writer.write("train", documents, train, probes, facts["eos_id"]),
        "validation": writer.write("validation", documents, validation),
    }
    if not splits["train"].documents:
        raise SourceError(f"all training documents of {part.source.url} became probes. Fix: fewer probes, or more documents")
    for split in splits.values():
        for name in (f"{shard}{suffix}" for shard in split.shards for suffix in (".bin", ".idx")):
            attempt.put(attempt.workdir / name, name)
            (attempt.workdir / name).unlink()
    return splits, probes


def _committed(attempt: Attempt, key: str) -> dict[str, Any]:
    unit = attempt.unit(key)
    if unit is None:
        raise StoreError(f"unit {key} of {attempt.job.path} was committed and is gone; run the stage again")
    return unit


def _open_unit(attempt: Attempt, key: str, unit: dict[str, Any], vocab_size: int) -> tuple[TokenFile, np.ndarray]:
    """Token file and content hashes of a task: the stored files, or local copies of them; content checked."""
    paths: dict[str, Path] = {}
    for name, record in unit["files"].items():
        found = attempt.store.digest(record["path"])
        if (found["size"], found["sha256"]) != (record["size"], record["sha256"]):
            raise StoreError(f"'{record['path']}' is damaged: it is not what unit {key} states; delete the unit to have it made again")
        if attempt.store.is_local:
            paths[name] = Path(attempt.store.full(record["path"]))
        else:
            paths[name] = attempt.workdir / f"{key}-{name}"
            with attempt.store.timed():
                attempt.store.fs.get_file(attempt.store.full(record["path"]), str(paths[name]))
    return TokenFile(paths["tokens.bin"], paths["tokens.idx"], vocab_size=vocab_size), np.load(paths["hashes.npy"])


def _total(counts: list[dict[str, dict[str, int]]]) -> dict[str, dict[str, int]]:
    """Sums the counts of all tasks, group by group."""
    total: dict[str, Counter[str]] = {"read": Counter(), "rejected": Counter(), "dropped": Counter()}
    for task in counts:
        for group, values in task.items():
            # `update` keeps zeros: a filter that dropped nothing is part of the account.
            total[group].update(values)
    return {group: dict(values) for group, values in total.items()}


def _story(counts: dict[str, dict[str, int]]) -> str:
    """`812 documents (5021344 bytes) read, rejected: 2 not_utf8, dropped: 17 length`."""
    text = f"{counts['read']['documents']} documents ({counts['read']['bytes']} bytes) read"
    for group in ("rejected", "dropped"):
        parts = [f"{number} {name}" for name, number in sorted(counts[group].items()) if number]
        text += f", {group}: {', '.join(parts)}" if parts else ""
    return text
