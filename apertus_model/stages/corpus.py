"""The `corpus` stage: one source becomes filtered, tokenised, shuffled Megatron token files.

Artifact: `train-*.bin/.idx`, `validation-*.bin/.idx`, `examples.jsonl` (a few kept and dropped documents),
`probes.json` where the spec asks for memorisation probes, `planted.json` where it plants documents,
`languages.parquet` where documents have a column `language`, and `robots.parquet` (domain, agent, documents,
characters) where robots.txt excluded any.

Invariants:
- Work is restartable by task (`files_per_task` files each): a task is a unit of the store, and a killed stage
  redoes only uncommitted tasks. The bytes of the artifact depend neither on the split into tasks, nor on the
  number of workers, nor on their machine.
- Every document and every token is accounted for: read = dropped + kept, kept = training + held out + probes.
  Copies of planted documents are in the training split only. A document of the source with the same text is
  left out and counted, so that their number is as stated.
- Duplicates are resolved here, after the tasks, from the hashes that they recorded.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer

from apertus_model.data import tallies
from apertus_model.data.documents import files_of_tasks
from apertus_model.data.duplicates import text_hash
from apertus_model.data.examples import Row, choose, cut, from_jsonl, to_jsonl
from apertus_model.data.megatron import TokenFile
from apertus_model.data.merge import Documents, Probe, Split, SplitWriter, choose_probes, probes_json
from apertus_model.data.planted import FILE as PLANTED
from apertus_model.data.planted import (
    PlantedSets,
    encoder,
    planted_documents,
    summary,
    to_json,
    tokenised,
)
from apertus_model.data.scored import StoredScores
from apertus_model.data.selection import CHARACTERS, DROPPED, Resolution, Selected, missing, resolve
from apertus_model.data.tokenise import CorpusTasks
from apertus_model.progress import Progress
from apertus_model.stop import StopSignal
from apertus_model.work import CommittedUnit, run_units
from infra.store import Attempt
from infra.store.inputs import SourceError
from specs.filters import labels
from specs.job import Job
from specs.stages.corpus import CorpusPart


def run(job: Job, attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Runs the stage. SourceError for a source that cannot be read, or holds too little."""
    part = CorpusPart.model_validate(job.spec)
    tokenizer = attempt.input_artifact("tokenizer")
    facts = tokenizer.manifest.facts
    planted = tokenised(planted_documents(part), encoder(tokenizer.local("tokenizer.json"), facts["bos_id"]))
    tasks = run_units(work_of(job, attempt), attempt, stop, progress, processes=part.WORKERS)
    selected = Selected.open([task.files for task in tasks], part.process.filters)
    found = resolve(part.process.filters, selected)
    counts = _total([task.data for task in tasks], labels(part.process.filters), found.counts)
    equal = _without_planted(planted, selected, found)
    documents = _kept_documents(tasks, selected, found, facts["vocab_size"])
    if not len(documents):
        raise SourceError(
            f"no document of {part.source.url} is left: {_story(counts)}. Fix: the globs, the format or the"
            " filters"
        )
    splits, probes = _write_splits(part, attempt, documents, planted, facts)
    kept = sum(split.documents for split in splits.values())
    tokens = sum(split.tokens for split in splits.values())
    attempt.write_bytes(
        "examples.jsonl", to_jsonl(_examples(part, tasks, selected, found, tokenizer.local("tokenizer.json")))
    )
    progress.log(
        f"{_story(counts)}; {len(documents)} kept, {splits['validation'].documents} of them held out,"
        f" {tokens} tokens"
    )
    attempt.commit(
        metrics={
            "documents": kept,
            "tokens": tokens,
            "tasks": len(tasks),
            "probes": len(probes),
            **({"planted": summary(planted), "equal_to_planted": equal} if planted else {}),
            "filters": labels(part.process.filters),
            **counts,
            **_tallies(part, attempt, tasks, selected, found),
            "replaced": dict(zip(part.process.replaced, found.replaced, strict=True)),
            **{
                name: {"documents": split.documents, "tokens": split.tokens} for name, split in splits.items()
            },
        },
        facts={
            "tokenizer": job.inputs["tokenizer"].fingerprint,
            "vocab_size": facts["vocab_size"],
            "bos_id": facts["bos_id"],
            "eos_id": facts["eos_id"],
            **{name: split.shards for name, split in splits.items()},
        },
    )


def work_of(job: Job, attempt: Attempt) -> CorpusTasks:
    """The tasks; a unit's data are its counts."""
    part = CorpusPart.model_validate(job.spec)
    tokenizer = attempt.input_artifact("tokenizer")
    facts = tokenizer.manifest.facts
    folder = attempt.workdir / "tasks"
    folder.mkdir(exist_ok=True)
    return CorpusTasks(
        part.source,
        part.process,
        files_of_tasks(part, "documents"),
        tokenizer.local("tokenizer.json"),
        facts["bos_token"],
        facts["eos_token"],
        folder,
        tuple(
            StoredScores(attempt.input_artifact(f"scores:{step}"), step, chosen.column)
            for step, chosen in part.process.scored.items()
        ),
    )


def _without_planted(planted: PlantedSets, selected: Selected, found: Resolution) -> int:
    """Leaves out documents with the text of a planted one; their number."""
    hashes = [text_hash(document.text) for documents in planted.values() for document in documents]
    equal = found.kept & np.isin(selected.records["final"], np.array(hashes, np.uint64))
    found.kept[equal] = False
    return int(equal.sum())


def _write_splits(
    part: CorpusPart, attempt: Attempt, documents: Documents, planted: PlantedSets, facts: dict[str, Any]
) -> tuple[dict[str, Split], list[Probe]]:
    held_out = documents.held_out(part.process.holdout)
    train, validation = np.flatnonzero(~held_out), np.flatnonzero(held_out)
    probes: list[Probe] = []
    if part.process.repeats is not None:
        probes = choose_probes(documents, train, part.process.repeats, part.seed)
        train = np.setdiff1d(train, [probe.document for probe in probes])
        attempt.write_json("probes.json", probes_json(probes, part.process.repeats.length))
    copied = [Probe(None, one.bucket, np.array(one.token_ids)) for texts in planted.values() for one in texts]
    if planted:
        attempt.write_json(PLANTED, to_json(planted))
    writer = SplitWriter(attempt.workdir, facts["vocab_size"], part.seed)
    splits = {
        "train": writer.write("train", documents, train, [*probes, *copied], facts["eos_id"]),
        "validation": writer.write("validation", documents, validation),
    }
    if not splits["train"].documents:
        raise SourceError(
            f"all training documents of {part.source.url} became probes. Fix: fewer probes, or more documents"
        )
    for split in splits.values():
        for name in (f"{shard}{suffix}" for shard in split.shards for suffix in (".bin", ".idx")):
            attempt.put(attempt.workdir / name, name)
            (attempt.workdir / name).unlink()
    return splits, probes


def _kept_documents(
    tasks: list[CommittedUnit], selected: Selected, found: Resolution, vocab_size: int
) -> Documents:
    parts = []
    for number, task in enumerate(tasks):
        tokens = TokenFile(task.files["tokens.bin"], task.files["tokens.idx"], vocab_size=vocab_size)
        records = selected.task(number)
        tokenised = selected.tokenised[records]
        parts.append((tokens, selected.records["final"][records][tokenised], found.kept[records][tokenised]))
    return Documents.open(parts)


def _tallies(
    part: CorpusPart, attempt: Attempt, tasks: list[CommittedUnit], selected: Selected, found: Resolution
) -> dict[str, Any]:
    """Puts `languages.parquet` and `robots.parquet` into the artifact, where there is anything to count.
    Returns the largest counts, for the metrics."""
    outcomes = np.where(found.gone >= 0, found.gone, selected.records["step"])
    ended = []
    for number, task in enumerate(tasks):
        records = selected.task(number)
        tokens = np.zeros(records.stop - records.start, np.int64)
        tokens[selected.tokenised[records]] = TokenFile(
            task.files["tokens.bin"], task.files["tokens.idx"]
        ).sizes
        tokens[~found.kept[records]] = 0
        ended.append(tallies.Task(task.files["tallies.parquet"], outcomes[records], tokens))
    steps = labels(part.process.filters)
    groups = tallies.total(ended, steps)
    metrics: dict[str, Any] = {}
    by_language = tallies.languages(groups)
    if by_language["language"].null_count < len(by_language):
        _put_table(attempt, "languages.parquet", by_language)
        metrics["languages"] = tallies.top_languages(by_language)
    robots = [
        label for label, step in zip(steps, part.process.filters, strict=True) if step.filter == "robots"
    ]
    if excluded := tallies.excluded(groups, robots):
        _put_table(attempt, "robots.parquet", pa.Table.from_pylist(excluded))
        metrics["robots"] = tallies.top_domains(excluded)
    return metrics


def _put_table(attempt: Attempt, name: str, table: pa.Table) -> None:
    pq.write_table(table, attempt.workdir / name, compression="zstd")
    attempt.put(attempt.workdir / name, name)
    (attempt.workdir / name).unlink()


def _examples(
    part: CorpusPart,
    tasks: list[CommittedUnit],
    selected: Selected,
    found: Resolution,
    tokenizer_file: Path,
) -> list[Row]:
    """Kept and dropped documents of all tasks; duplicates by decoding their tokens."""
    candidates = [from_jsonl(task.files["examples.jsonl"].read_bytes()) for task in tasks]
    rows = choose(candidates, [*labels(part.process.filters), "kept", "replaced"], missing(found, selected))
    tokenizer = Tokenizer.from_file(str(tokenizer_file))

    def text(record: int) -> str | None:
        if not selected.tokenised[record]:
            return None
        number = int(np.searchsorted(selected.starts, record, side="right")) - 1
        tokens = TokenFile(tasks[number].files["tokens.bin"], tasks[number].files["tokens.idx"])
        ids = tokens[int(selected.tokenised[selected.starts[number] : record].sum())]
        return cut(tokenizer.decode(ids[1:-1].tolist(), skip_special_tokens=False))

    for label, duplicates in found.duplicates.items():
        for duplicate in duplicates:
            facts = {
                "value": f"one of {duplicate.group} alike",
                "rule": "the one with the smallest hash stays",
            }
            texts = {"text": text(duplicate.document), "like": text(duplicate.kept)}
            rows.append({"reason": label, "hash": f"{duplicate.text:016x}", **facts, **texts})
    return rows


def _total(
    counts: list[dict[str, dict[str, int]]], steps: list[str], resolved: dict[str, dict[str, int]]
) -> dict[str, dict[str, int]]:
    """Sums the counts of all tasks, group by group; includes steps that dropped nothing."""
    total: dict[str, Counter[str]] = {
        "read": Counter(),
        "rejected": Counter(),
        DROPPED: Counter(),
        CHARACTERS: Counter(),
    }
    for task in [*counts, resolved]:
        for group, values in task.items():
            total[group].update(values)
    return {
        "read": dict(total["read"]),
        "rejected": dict(total["rejected"]),
        **{group: {step: total[group][step] for step in steps} for group in (DROPPED, CHARACTERS)},
    }


def _story(counts: dict[str, dict[str, int]]) -> str:
    """`812 documents (5021344 bytes) read, rejected: 2 not_utf8, dropped: 17 length`."""
    text = f"{counts['read']['documents']} documents ({counts['read']['bytes']} bytes) read"
    for group in ("rejected", "dropped"):
        parts = [f"{number} {name}" for name, number in sorted(counts[group].items()) if number]
        text += f", {group}: {', '.join(parts)}" if parts else ""
    return text
