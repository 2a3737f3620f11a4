"""The outcome of all passes together against the plain reading of the spec: one step after the other over the
whole source."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from datatrove.data import Document
from tokenizers import Tokenizer

from apertus_model.data.corpora.duplicates import MinHash, text_hash
from apertus_model.data.corpora.filters import make_check
from apertus_model.data.corpora.records import read_rejects
from apertus_model.data.tokens.megatron import TokenFile
from infra.store import Artifact
from specs.filters import ExactDuplicatesFilter, NearDuplicatesFilter, labels
from specs.stages.corpus import CorpusSource
from tests.machine import slow

Item = tuple[str, dict[str, Any]]
LISTS = {
    "exact in the middle": [
        {"filter": "length", "min_characters": 30},
        {"filter": "exact-duplicates"},
        {"filter": "score", "column": "s", "min": 2},
    ],
    "near first": [
        {"filter": "near-duplicates", "ngram": 2, "buckets": 6, "hashes_per_bucket": 2},
        {"filter": "sample", "rate": 0.7},
    ],
    "both, and filters around": [
        {"filter": "sample", "rate": 0.9},
        {"filter": "exact-duplicates"},
        {"filter": "score", "column": "s", "min": 1},
        {"filter": "near-duplicates", "ngram": 2, "buckets": 6, "hashes_per_bucket": 2},
        {"filter": "length", "max_characters": 60},
        {"filter": "exact-duplicates"},
    ],
    "no comparison": [{"filter": "length", "min_characters": 30}, {"filter": "length", "max_characters": 60}],
}


def _documents(seed: int) -> list[Item]:
    """Eighty texts of few words: many are equal, many are alike."""
    random = Random(seed)
    names = [f"word{chr(97 + i)}" for i in range(12)]
    texts = [" ".join(random.choices(names, k=random.randint(3, 12))) for _ in range(25)]
    documents = []
    for _ in range(80):
        text = random.choice(texts)
        if random.random() < 0.5:
            split = text.split()
            split[random.randrange(len(split))] = random.choice(names)
            text = " ".join(split)
        documents.append((text, {"s": random.randint(0, 3)}))
    return documents


def _plainly(
    process: CorpusSource, documents: list[Item], folder: Path
) -> tuple[Counter[str], dict[str, tuple[int, int]]]:
    """Each step over everything that is left: the texts that stay, and (documents, characters) dropped by
    each step."""

    def place(item: Item) -> tuple[int, int]:
        return text_hash(item[0]), text_hash(json.dumps([item[1][name] for name in process.columns()]))

    left, dropped = list(documents), {}
    for step, label in zip(process.filters, labels(process.filters), strict=True):
        if isinstance(step, (ExactDuplicatesFilter, NearDuplicatesFilter)):
            if isinstance(step, NearDuplicatesFilter):
                signature = {text: MinHash(step).signature(text) for text, _ in left}
            else:
                signature = {text: np.array([text_hash(text)]) for text, _ in left}
            left.sort(key=place)
            stay: list[Item] = []
            waiting = list(left)
            while waiting:
                group = [waiting.pop(0)]
                stay.append(group[0])
                for member in group:  # grows while it is walked
                    alike = [bool((signature[member[0]] == signature[other[0]]).any()) for other in waiting]
                    group += [other for other, same in zip(waiting, alike, strict=True) if same]
                    waiting = [other for other, same in zip(waiting, alike, strict=True) if not same]
        else:
            check = make_check(step, folder)
            stay = [item for item in left if check(Document(item[0], "d", metadata=dict(item[1]))) is None]
        dropped[label] = (
            len(left) - len(stay),
            sum(len(text) for text, _ in left) - sum(len(text) for text, _ in stay),
        )
        left = stay
    return Counter(text for text, _ in left), dropped


@pytest.mark.parametrize(
    "name", ["both, and filters around", "no comparison", *map(slow, ("exact in the middle", "near first"))]
)
def test_deduplication_keeps_its_place_among_the_filters(
    name: str, bench: Any, tokenizer: Artifact, tmp_path: Path
) -> None:
    process = CorpusSource.model_validate({"filters": LISTS[name], "pii": False})
    documents = _documents(1)
    expected_kept, expected_dropped = _plainly(process, documents, tmp_path)
    plain = Tokenizer.from_file(str(tokenizer.local("tokenizer.json")))
    shards = []
    for number, (files, memory) in enumerate(((1, "4GiB"), (3, "8KiB"))):
        folder = tmp_path / f"rows-{number}"
        folder.mkdir()
        shuffled = list(enumerate(documents))
        Random(number).shuffle(shuffled)
        for file in range(files):
            rows = [{"text": text, "i": str(i), **data} for i, (text, data) in shuffled[file::files]]
            (folder / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        spec = {
            "source": {"url": str(folder), "format": "jsonl", "id_column": "i"},
            "process": {"filters": LISTS[name], "pii": False, "holdout": 0.3},
            "seed": 1,
            "files_per_task": 1,
            "memory": memory,
            "shard_tokens": 50,
        }
        corpus = bench.run("corpus", f"{name.replace(' ', '')}{number}", spec, {"tokenizer": tokenizer})
        facts, metrics = corpus.manifest.facts, corpus.manifest.metrics
        kept: Counter[str] = Counter()
        for shard in [*facts["train"], *facts["validation"]]:
            file = TokenFile(corpus.local(f"{shard}.bin"))
            texts = [plain.decode(file[i].tolist()) for i in range(len(file))]
            side = pq.read_table(corpus.local(f"{shard}.documents.parquet"))
            assert side.column("hash").to_pylist() == [text_hash(text) for text in texts]
            assert [documents[int(i)][0] for i in side.column("id").to_pylist()] == texts
            assert side.column("tokens").to_pylist() == file.sizes.tolist()
            kept.update(texts)
        assert kept == expected_kept
        assert len(facts["train"]) > 1
        dropped = {
            label: (metrics["dropped"][label], metrics["dropped_characters"][label])
            for label in labels(process.filters)
        }
        assert dropped == expected_dropped
        rejects = [
            row
            for one in facts["rejects"]
            for row in read_rejects(corpus.local(f"{one}.parquet")).to_pylist()
        ]
        assert Counter(row["filter"] for row in rejects) == {
            label: count for label, (count, _) in expected_dropped.items() if count
        }
        assert all(row["hash"] == text_hash(documents[int(row["id"])][0]) for row in rejects)
        shards.append({name: corpus.bytes(name) for name in corpus.manifest.files})
    assert shards[0] == shards[1]
