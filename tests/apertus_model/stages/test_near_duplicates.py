"""Groups of near-duplicates of a corpus are those of datatrove's four steps, from the same documents and
settings; documents of fewer words than an n-gram, which datatrove leaves alone, are grouped with their
copies."""

from __future__ import annotations

import json
import re
import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from pydoc_data import topics
from random import Random
from typing import Any

import pyarrow.parquet as pq
import pytest
from datatrove.data import Document
from datatrove.pipeline.dedup.minhash import (
    MinhashConfig,
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupSignature,
)

from apertus_model.data.corpora.duplicates import text_hash
from infra.store import Artifact
from tests.apertus_model.corpora import Words

FILES = 5
NGRAM = 5
Groups = set[frozenset[str]]


def _documents() -> dict[str, str]:
    """Paragraphs of Python's manual, with copies of which up to a third of the words are changed, step by
    step; by identifier."""
    random = Random(3)
    paragraphs = [part for topic in topics.topics.values() for part in topic.split("\n\n")]
    chosen = random.sample([part for part in paragraphs if 30 <= len(part.split()) <= 200], 250)
    found = list(chosen)
    for text in chosen[:150]:
        words = text.split(" ")
        for _ in range(random.randint(1, 5)):
            for _ in range(random.choice([0, 1, 1, 2, len(words) // 15])):
                words[random.randrange(len(words))] = random.choice(["alpha", "7", "Été", "x" * 30])
            found.append(" ".join(words))
    found += [text.upper() for text in chosen[150:170]] + [f"{text}!" for text in chosen[160:180]]
    found += ["人工知能は言葉を読む機械である。" * 3, "人工知能は言葉を読む機械である! " * 3]
    found += ["one two three", "one two three", "One two, three", "four words are there", "?", "?", "!"]
    random.shuffle(found)
    return {f"{number:04d}": text for number, text in enumerate(found)}


def _peer(files: list[list[str]], texts: dict[str, str], folder: Path, config: MinhashConfig) -> Groups:
    """Clusters of two or more documents by datatrove."""
    for rank, ids in enumerate(files):
        documents = (Document(texts[one], one) for one in ids)
        MinhashDedupSignature(str(folder / "signatures"), config, language=Words()).run(
            documents, rank, FILES
        )
    buckets = MinhashDedupBuckets(str(folder / "signatures"), str(folder / "pairs"), config=config)
    for rank in range(config.num_buckets):
        buckets.run(None, rank, config.num_buckets)
    clusters = str(folder / "clusters")
    MinhashDedupCluster(str(folder / "pairs"), clusters, config, save_cluster_id=True).run(None, 0, 1)
    found = defaultdict(set)
    for rank, ids in enumerate(files):
        for place, cluster in _pairs(folder / "clusters" / f"{rank:06d}.clusters"):
            found[cluster].add(ids[place])
    return {frozenset(group) for group in found.values()}


def _pairs(file: Path) -> Iterator[tuple[int, int]]:
    return struct.iter_unpack("<2I", file.read_bytes()) if file.exists() else iter(())


def _ours(corpus: Artifact) -> Groups:
    """Groups of two or more documents: those that are dropped, by the hash of the one that stays."""
    found = defaultdict(set)
    for split in ("train", "validation"):
        for row in pq.read_table(corpus.local(f"{split}-00000.documents.parquet")).to_pylist():
            found[f"{row['hash']:016x}"].add(row["id"])
    kept = {one for group in found.values() for one in group}
    for row in pq.read_table(corpus.local("rejects-00000.parquet")).to_pylist():
        like = re.search(r"[0-9a-f]{16}", row["reason"])
        assert like is not None
        found[like[0]].add(row["id"])
    assert all(len(group & kept) == 1 for group in found.values()), "one of each group stays"
    return {frozenset(group) for group in found.values() if len(group) > 1}


@pytest.mark.parametrize(("buckets", "hashes"), [(14, 8), (4, 2)])
def test_groups_are_those_of_datatrove(
    bench: Any, tmp_path: Path, tokenizer: Artifact, buckets: int, hashes: int
) -> None:
    texts = _documents()
    files = [list(texts)[rank::FILES] for rank in range(FILES)]
    source = tmp_path / "lines"
    source.mkdir()
    for rank, ids in enumerate(files):
        rows = (json.dumps({"id": one, "text": texts[one]}) + "\n" for one in ids)
        (source / f"{rank}.jsonl").write_text("".join(rows))
    step = {"filter": "near-duplicates", "buckets": buckets, "hashes_per_bucket": hashes, "ngram": NGRAM}
    spec = {
        "source": {"url": str(source), "format": "jsonl", "id_column": "id"},
        "process": {"filters": [step], "pii": False, "holdout": 0.2},
        "seed": 28,
        "files_per_task": 2,
    }
    ours = _ours(bench.run("corpus", "c", spec, {"tokenizer": tokenizer}))
    theirs = _peer(files, texts, tmp_path, MinhashConfig(NGRAM, buckets, hashes))
    few = {one for one, text in texts.items() if len(Words().word_tokenize(text)) < NGRAM}
    assert {group for group in ours if not group & few} == theirs
    assert len(theirs) > 100 and max(map(len, theirs)) > 4
    copies = defaultdict(set)
    for one in few:
        copies[text_hash(texts[one])].add(one)
    expected = {frozenset(group) for group in copies.values() if len(group) > 1}
    assert {group for group in ours if group & few} == expected and len(expected) == 2
