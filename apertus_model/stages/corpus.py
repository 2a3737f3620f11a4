"""The `corpus` stage: turns one source into filtered, tokenised, shuffled Megatron token files.

Artifact: for each split `<split>-*.bin/.idx`, and `<split>-*.documents.parquet`, a row for each document of
the shard; `rejects-*.parquet`, a row for each document that was removed; `kept-*.parquet`, the hashes and
signatures that other corpora are compared with; `examples.jsonl` (a few kept and dropped documents);
`probes.json` where the spec asks for memorisation probes, `planted.json` where it plants documents,
`languages.parquet` where documents have a column `language`, and `robots.parquet` (domain, agent, documents,
characters, tokens) where robots.txt excluded any.

Invariants:
- The bytes of the artifact depend neither on the split into units, nor on the memory of a worker, nor on the
  number of workers, nor on their machines.
- Every document and every token is accounted for: read = dropped + kept, kept = training + held out + probes.
  Copies of planted documents are in the training split only. A source document with the text of a planted
  one is left out and counted, so that the number of copies is as stated.
"""

import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from apertus_model.data.corpora import tallies
from apertus_model.data.corpora.examples import Row, choose, joined, to_jsonl
from apertus_model.data.corpora.passes import CorpusPasses, counts_line, files_of
from apertus_model.data.corpora.plan import SPLITS
from apertus_model.data.corpora.planted import FILE as PLANTED
from apertus_model.data.corpora.planted import PROBES, StoredProbes, stored_probes, summary, to_json
from apertus_model.data.corpora.units import CorpusUnits as Units
from apertus_model.data.corpora.verdicts import MOST_PARTS
from apertus_model.progress import Progress
from apertus_model.stop import StopSignal
from infra.store import Attempt
from specs.filters import labels


def run(attempt: Attempt, progress: Progress, stop: StopSignal) -> None:
    """Runs the stage. SourceError for a source that cannot be read, or holds too little."""
    passes = CorpusPasses(attempt, progress, stop)
    passes.plant()
    passes.filter()
    passes.resolve()
    counts, equal = passes.scatter()
    shards = passes.write()
    work, layout = passes.work, passes.work.layout
    probes, planted = _probes(work), work.planted
    if probes is not None:
        attempt.write_json(PROBES, probes.model_dump())
    if planted:
        attempt.write_json(PLANTED, to_json(planted))
    attempt.write_bytes("examples.jsonl", to_jsonl(_examples(work)))
    totals = {
        split: {
            what: sum(counts[what] for name, counts in shards.items() if name.startswith(f"{split}-"))
            for what in ("documents", "tokens")
        }
        for split in SPLITS
    }
    kept = sum(split["documents"] for split in totals.values())
    tokens = sum(split["tokens"] for split in totals.values())
    held_out = totals["validation"]["documents"]
    progress.log(f"{counts_line(counts)}; {kept} kept, {held_out} of them held out, {tokens} tokens")
    facts = work.tokenizer.manifest.facts
    filled = [name for name in sorted(shards) if shards[name]["tokens"]]
    attempt.commit(
        metrics={
            "documents": kept,
            "tokens": tokens,
            "tasks": sum(map(len, work.plan.spans)),
            "probes": len(layout.probes),
            **({"planted": summary(planted), "equal_to_planted": equal} if planted else {}),
            "filters": labels(work.steps),
            **counts,
            **_tallies(work),
            **totals,
        },
        facts={
            "tokenizer": attempt.job.inputs["tokenizer"].fingerprint,
            **{name: facts[name] for name in ("vocab_size", "bos_id", "eos_id")},
            **{split: [name for name in filled if name.startswith(f"{split}-")] for split in SPLITS},
            **{kind: files_of(layout, kind) for kind in ("kept", "rejects")},
        },
    )


def _seen(work: Units) -> Iterator[dict[str, Any]]:
    """Yields the examples, texts and probes that each scatter unit has stored."""
    for file in work.files(work.of_spans("scatter"), "examples.json"):
        yield json.loads(file.bytes())


def _tallies(work: Units) -> dict[str, Any]:
    """Puts `languages.parquet` and `robots.parquet` into the artifact, if there is anything to count. Returns
    the largest counts, for the metrics."""
    files = work.files(work.of_spans("scatter"), tallies.FILE)
    groups = tallies.total(file.stream() for file in files)
    metrics: dict[str, Any] = {}
    by_language = tallies.languages(groups)
    if by_language["language"].null_count < len(by_language):
        _put_table(work.attempt, "languages.parquet", by_language)
        metrics["languages"] = tallies.top_languages(by_language)
    names = labels(work.steps)
    robots = [name for name, step in zip(names, work.steps, strict=True) if step.filter == "robots"]
    if excluded := tallies.excluded(groups, robots):
        _put_table(work.attempt, "robots.parquet", pa.Table.from_pylist(excluded))
        metrics["robots"] = tallies.top_domains(excluded)
    return metrics


def _put_table(attempt: Attempt, name: str, table: pa.Table) -> None:
    path = attempt.workdir / name
    pq.write_table(table, path, compression="zstd")
    attempt.put(path, name)
    path.unlink()


def _probes(work: Units) -> StoredProbes | None:
    """The content of probes.json; None unless the spec asks for probes."""
    repeats = work.part.process.repeats
    tokens: dict[str, list[int]] = {}
    if repeats is None:
        return None
    for seen in _seen(work):
        tokens |= seen["probes"]
    return stored_probes(work.layout.probes, tokens, repeats.length)


def _examples(work: Units) -> list[Row]:
    """Kept and dropped documents of all spans; duplicates are shown with the text that stays."""
    names = labels(work.steps)
    candidates: list[Row] = []
    texts: dict[str, str] = {}
    for seen in _seen(work):
        candidates = joined([*candidates, *seen["rows"]])
        texts |= seen["texts"]
    rows = choose(candidates, [*names, "kept", "replaced"])
    for pair in work.layout.shown:
        text, kept = f"{pair.text:016x}", f"{pair.kept:016x}"
        value = f"like {kept}" if pair.kept >= MOST_PARTS else "like a document of another corpus"
        facts = {"value": value, "rule": "one of each group stays"}
        both = {"text": texts.get(text), "like": texts.get(kept)}
        rows.append({"reason": names[pair.step], "hash": text, **facts, **both})
    return rows
