"""Filters in the corpus stage: the same bytes whatever the workers, tasks and names; only unfinished tasks
are done again."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from apertus_model.data.corpora.examples import from_jsonl
from apertus_model.data.tokens.megatron import TokenFile
from infra.store import Artifact
from infra.store.inputs import SourceError
from tests.apertus_model.attempts import Interrupted, StopsAfterOneUnit, stored_bytes, units_of
from tests.apertus_model.corpora import corpus_spec, tokens_of
from tests.machine import slow

FILTERS: list[dict[str, Any]] = [
    {"filter": "length", "min_characters": 20},
    {"filter": "exact-duplicates"},
    {"filter": "sample", "rate": 0.9},
    {"filter": "near-duplicates"},
    {"filter": "decontaminate", "against": [{"url": "{questions}", "format": "text"}]},
    {"filter": "alphabetic", "min_share": 0.5},
]


@pytest.fixture
def questions(tmp_path: Path, texts: list[str]) -> Path:
    """The first ten words of three documents."""
    folder = tmp_path / "questions"
    folder.mkdir()
    for i in (3, 17, 42):
        (folder / f"{i}.txt").write_text(" ".join(texts[i].split()[:12]))
    return folder


@pytest.fixture
def collection(tmp_path: Path, texts: list[str], questions: Path) -> list[str]:
    """Every text of the bench, ten of them twice, ten with a changed word, and what the filters are there
    for."""
    random = Random(1)
    near = []
    for text in texts[10:20]:
        split = text.split(" ")
        split[random.randrange(3, len(split))] = "changed"
        near.append(" ".join(split))
    odd = [
        "short",
        "12345 67890 " * 9,
        *(f"{text} Write to jane.doe@mail.example, DE89 3704 0044 0532 0130 00." for text in texts[50:55]),
    ]
    return [*texts, *texts[:10], *near, *odd]


def _write(folder: Path, collection: list[str], names: int) -> Path:
    """The documents as files, in an order and under names that `names` decides."""
    folder.mkdir()
    shuffled = collection.copy()
    Random(names).shuffle(shuffled)
    for index, text in enumerate(shuffled):
        (folder / f"{names}-{index:03d}.txt").write_text(text)
    return folder


def _spec(documents: Path, questions: Path, files_per_task: int) -> dict[str, Any]:
    filters = json.loads(json.dumps(FILTERS).replace("{questions}", str(questions)))
    source = {"url": str(documents), "format": "text", "include": ["*.txt"]}
    return {
        "source": source,
        "process": {"holdout": 0.2, "filters": filters},
        "seed": 28,
        "files_per_task": files_per_task,
    }


class StopsAfterTwoUnits(StopsAfterOneUnit):
    LAST = 2


def test_filtered_bytes_do_not_depend_on_workers_tasks_names_or_kills(
    bench: Any, tmp_path: Path, tokenizer: Artifact, collection: list[str], questions: Path
) -> None:
    inputs = {"tokenizer": tokenizer}
    one = bench.run(
        "corpus", "one", _spec(_write(tmp_path / "a", collection, 1), questions, 1000), inputs, workers=1
    )
    assert one.manifest.metrics["tasks"] == 1
    many = _spec(_write(tmp_path / "b", collection, 2), questions, 19)
    with pytest.raises(Interrupted):
        bench.run("corpus", "two", many, inputs, workers=2, attempt_class=StopsAfterTwoUnits)
    first = units_of(bench, "corpus/two", "first")
    two = bench.run("corpus", "two", many, inputs, attempt="second", workers=2)
    assert two.manifest.metrics["tasks"] == 5 and len(first) >= 2
    one_bytes, two_bytes = (
        {
            name: data
            for name, data in stored_bytes(corpus).items()
            if not name.startswith("rejects-") and not name.endswith(".documents.parquet")
        }
        for corpus in (one, two)
    )  # these tables have ids, and files other names
    assert one_bytes == two_bytes
    assert {**one.manifest.metrics, "tasks": 5} == two.manifest.metrics


def test_every_document_and_character_is_accounted_for(
    bench: Any, tmp_path: Path, tokenizer: Artifact, collection: list[str], questions: Path
) -> None:
    corpus = bench.run(
        "corpus", "c", _spec(_write(tmp_path / "a", collection, 1), questions, 40), {"tokenizer": tokenizer}
    )
    metrics = corpus.manifest.metrics
    dropped, characters = metrics["dropped"], metrics["dropped_characters"]
    assert metrics["filters"] == [step["filter"] for step in FILTERS]
    assert set(dropped) == set(characters) == set(metrics["filters"])
    assert metrics["read"]["documents"] == len(collection)
    assert metrics["read"]["characters"] == sum(map(len, collection))
    assert sum(dropped.values()) + metrics["documents"] == len(collection)
    assert (dropped["length"], characters["length"]) == (1, 5)
    assert (dropped["exact-duplicates"], characters["exact-duplicates"]) == (
        10,
        sum(len(text) for text in collection[:10]),
    )
    assert dropped["near-duplicates"] >= 8
    assert dropped["decontaminate"] >= 2
    assert metrics["replaced"]["email"] == metrics["replaced"]["iban"] > 0 == metrics["replaced"]["ip"]
    plain = Tokenizer.from_file(str(tokenizer.local("tokenizer.json")))
    files = [TokenFile(corpus.local(f"{split}-00000.bin")) for split in ("train", "validation")]
    kept = [plain.decode(file[i].tolist()) for file in files for i in range(len(file))]
    assert len(set(kept)) == len(kept)
    assert sum(text.count("<email-pii>") for text in kept) == metrics["replaced"]["email"]
    rows = from_jsonl(corpus.bytes("examples.jsonl"))
    for row in rows:
        whole = (
            any(row["text"] in text for text in kept) if row["reason"] == "replaced" else row["text"] in kept
        )
        assert whole is (row["reason"] in ("kept", "replaced", "exact-duplicates")), row
    duplicate = next(row for row in rows if row["reason"] == "near-duplicates")
    assert duplicate["like"] != duplicate["text"] and duplicate["value"].startswith("like ")
    assert {row["reason"] for row in rows} >= {
        "length",
        "exact-duplicates",
        "near-duplicates",
        "decontaminate",
        "kept",
        "replaced",
    }
    assert all(sum(row["reason"] == reason for row in rows) <= 3 for reason in dropped)


@pytest.mark.parametrize(("near", "workers"), [(False, 1), slow(True, 2)])
def test_a_corpus_leaves_out_what_others_keep(
    bench: Any, tmp_path: Path, tokenizer: Artifact, texts: list[str], near: bool, workers: int
) -> None:
    """Two others have 25 and 15 of its 60 texts. Of documents that are nearly alike, the first corpus keeps
    one; of what is like one of them, this corpus keeps none."""
    words = [text.split(" ") for text in texts[:10]]
    changed = [" ".join([*one[:5], "changed", *one[6:]]) for one in words]
    step: dict[str, Any] = {"filter": "exact-duplicates"}
    if near:
        step = {"filter": "near-duplicates", "ngram": 2}

    def run(name: str, some: list[str], inputs: dict[str, Artifact], **more: Any) -> Artifact:
        spec = corpus_spec(
            _write(tmp_path / name, some, 1), holdout=0.2, pii=False, filters=[{**step, **more}]
        )
        return bench.run("corpus", name, spec, {"tokenizer": tokenizer} | inputs, workers=workers)

    def kept(corpus: Artifact) -> set[str]:
        plain = Tokenizer.from_file(str(tokenizer.local("tokenizer.json")))
        return {
            plain.decode(tokens) for split in ("train", "validation") for tokens in tokens_of(corpus, split)
        }

    first, second = run("first", texts[:25], {}), run("second", texts[20:35], {})
    assert kept(first) == set(texts[:25])
    both = {"not_in:0:0": first, "not_in:0:1": second}
    corpus = run("third", [*texts, *changed, texts[59]], both, not_in=["first", "second"])
    unchanged = set(texts[35:])
    if near:
        exact = [
            len(_pairs(old) & _pairs(new)) / len(_pairs(old) | _pairs(new))
            for old, new in zip(texts, changed, strict=False)
        ]
        assert min(exact) > 0.8
        assert kept(corpus) == unchanged
    else:
        assert kept(corpus) == unchanged | set(changed)
    rows = pq.read_table(corpus.local("rejects-00000.parquet")).to_pylist()
    assert len(rows) == 35 + 1 + 10 * near
    reasons = Counter(row["reason"] for row in rows)
    if near:
        assert reasons.pop("like a document of corpus/first or corpus/second") == 45
    else:
        # What both have is told of the first.
        assert reasons.pop("the same text as a document of corpus/first") == 25
        assert reasons.pop("the same text as a document of corpus/second") == 10
    assert len(reasons) == 1 and next(iter(reasons)).startswith("the same text as ")


def _pairs(text: str) -> set[tuple[str, str]]:
    return set(pairwise(text.split()))


def test_columns_of_rows_reach_the_filters(
    bench: Any, tmp_path: Path, tokenizer: Artifact, texts: list[str]
) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    (tmp_path / "domains.txt.gz").write_bytes(gzip.compress(b"closed.example\n"))
    rows = [
        {
            "text": text,
            "url": f"https://{('open', 'www.closed')[i % 2]}.example/{i}",
            "lang": "de",
            "language": ("de", "fr")[i % 4 == 0],
            "toxic_score": 0.99 + i / 6000,
            "stars": i,
        }
        for i, text in enumerate(texts)
    ]
    for start in range(0, 60, 20):
        (folder / f"{start}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows[start : start + 20])
        )
    filters = [
        {"filter": "robots", "domains": str(tmp_path / "domains.txt.gz")},
        {"filter": "score", "column": "stars", "min": 10},
        {"filter": "toxicity", "classifier": "c", "language_column": "lang"},
    ]
    spec = {
        "source": {"url": str(folder), "format": "jsonl", "metadata": ["language"]},
        "process": {"holdout": 0.3, "filters": filters},
        "seed": 1,
        "files_per_task": 1,
    }
    corpus = bench.run("corpus", "c", spec, {"tokenizer": tokenizer}, workers=2)
    left = [i for i in range(10, 60, 2) if 0.99 + i / 6000 < 0.9977]
    assert corpus.manifest.metrics["dropped"] == {"robots": 30, "score": 5, "toxicity": 25 - len(left)}
    metrics = corpus.manifest.metrics
    assert metrics["documents"] == len(left)
    by_language = pq.read_table(corpus.local("languages.parquet")).to_pylist()
    french = {row["outcome"]: row["documents"] for row in by_language if row["language"] == "fr"}
    assert french == {
        outcome: number
        for outcome, number in {
            "score": len(range(0, 10, 4)),
            "kept": sum(i % 4 == 0 for i in left),
            "toxicity": sum(i % 4 == 0 and i not in left for i in range(10, 60, 2)),
        }.items()
        if number
    }
    assert sum(row["documents"] for row in by_language) == 60
    assert sum(row["tokens"] for row in by_language if row["outcome"] == "kept") == metrics["tokens"]
    closed = texts[1:60:2]
    plain = Tokenizer.from_file(str(tokenizer.local("tokenizer.json")))
    tokens = sum(len(plain.encode(text, add_special_tokens=False).ids) + 2 for text in closed)
    dropped = {"documents": 30, "characters": sum(map(len, closed)), "tokens": tokens}
    assert metrics["robots"] == [{"domain": "closed.example", "agent": "(any)", **dropped}]
    assert pq.read_table(corpus.local("robots.parquet")).to_pylist() == [
        {"domain": "closed.example", "agent": agent, **dropped} for agent in ("(any)", "(listed)")
    ]


def test_a_damaged_unit_is_refused(bench: Any, tmp_path: Path, tokenizer: Artifact, documents: Path) -> None:
    spec = {
        "source": {"url": str(documents), "format": "text"},
        "process": {"holdout": 0.2},
        "seed": 1,
        "files_per_task": 20,
    }
    with pytest.raises(Interrupted):
        bench.run("corpus", "c", spec, {"tokenizer": tokenizer}, attempt_class=StopsAfterTwoUnits)
    stored = next(Path(bench.store.root).glob("corpus/c/attempts/*/units/*/documents.parquet"))
    stored.chmod(0o644)
    stored.write_bytes(stored.read_bytes()[:-1])
    with pytest.raises(RuntimeError, match=r"documents\.parquet' is damaged"):
        bench.run("corpus", "c", spec, {"tokenizer": tokenizer}, attempt="second")


def test_a_source_that_the_filters_empty_says_how(bench: Any, documents: Path, tokenizer: Artifact) -> None:
    filters = [{"filter": "exact-duplicates"}, {"filter": "near-duplicates"}, {"filter": "sample", "rate": 0}]
    for first, reasons in (([], "60 sample"), ([{"filter": "length", "min_characters": 10**6}], "60 length")):
        process = {"filters": [*first, *filters]}
        spec = {
            "source": {"url": str(documents), "format": "text"},
            "process": process,
            "seed": 1,
            "files_per_task": 40,
        }
        with pytest.raises(
            SourceError, match=rf"no document of .* is left: 60 documents .* dropped: {reasons}\."
        ):
            bench.run("corpus", reasons.split()[1], spec, {"tokenizer": tokenizer})


def test_without_examples_no_document_is_stored_as_it_was_read(
    bench: Any, tokenizer: Artifact, documents: Path
) -> None:
    kinds = {}
    for wanted in (True, False):
        process = {"holdout": 0.2, "examples": wanted, "filters": [{"filter": "sample", "rate": 0.5}]}
        spec = {
            "source": {"url": str(documents), "format": "text"},
            "process": process,
            "seed": 1,
            "files_per_task": 20,
        }
        corpus = bench.run("corpus", str(wanted), spec, {"tokenizer": tokenizer})
        kinds[wanted] = {row["reason"] for row in from_jsonl(corpus.bytes("examples.jsonl"))}
        assert bench.store.exists(corpus.stored_name("examples.jsonl"))
    assert kinds == {True: {"sample", "kept"}, False: set()}
