from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from apertus_model.data.tokens.megatron import TokenFile
from infra.store import Artifact
from infra.store.inputs import SourceError
from specs.errors import StageError
from tests.apertus_model.attempts import Interrupted, StopsAfterOneUnit, stored_bytes, units_of
from tests.apertus_model.corpora import corpus_spec, tokens_of
from tests.machine import slow


def test_the_counts_account_for_every_document_and_token(
    bench: Any, documents: Path, tokenizer: Artifact
) -> None:
    (documents / "bad.txt").write_bytes(b"\xff\xff")
    (documents / "blank.txt").write_bytes(b"\n")
    (documents / "short.txt").write_text("short")
    (documents / "digits.txt").write_text("0123456789 " * 20)
    (documents / "lines.txt").write_text("the same line again\n" * 20)
    filters = [
        {"filter": "length", "min_characters": 10},
        {"filter": "alphabetic", "min_share": 0.5},
        {"filter": "repeated-lines"},
    ]
    corpus = bench.run("corpus", "c", corpus_spec(documents, filters=filters), {"tokenizer": tokenizer})
    metrics = corpus.manifest.metrics
    assert metrics["rejected"] == {"not_utf8": 1, "empty": 1}
    assert metrics["dropped"] == {"length": 1, "alphabetic": 1, "repeated-lines": 1}
    assert metrics["read"]["documents"] == 63
    read = [path for path in documents.glob("*.txt") if path.stem not in ("bad", "blank")]
    assert metrics["read"]["bytes"] == sum(len(path.read_bytes()) for path in read)
    assert metrics["documents"] == 60 == metrics["train"]["documents"] + metrics["validation"]["documents"]
    for split in ("train", "validation"):
        assert metrics[split]["tokens"] == sum(map(len, tokens_of(corpus, split)))
    assert metrics["tokens"] == metrics["train"]["tokens"] + metrics["validation"]["tokens"]
    shards = {split: [f"{split}-00000"] for split in ("train", "validation", "kept", "rejects")}
    assert corpus.manifest.facts == {
        "tokenizer": "tokenizer0",
        "vocab_size": 512,
        "bos_id": 1,
        "eos_id": 2,
        **shards,
    }


def test_the_bytes_do_not_depend_on_workers_tasks_or_file_names(
    bench: Any, documents: Path, tokenizer: Artifact
) -> None:
    one = bench.run("corpus", "one", corpus_spec(documents), {"tokenizer": tokenizer}, workers=1)
    two = bench.run(
        "corpus", "two", corpus_spec(documents, files_per_task=11), {"tokenizer": tokenizer}, workers=2
    )
    assert one.manifest.metrics["tasks"] == 9
    assert two.manifest.metrics["tasks"] == 6
    assert stored_bytes(one) == stored_bytes(two)
    for path in list(documents.glob("*.txt")):
        path.rename(documents / f"{hashlib.sha256(path.name.encode()).hexdigest()[:8]}.txt")
    renamed = bench.run("corpus", "renamed", corpus_spec(documents), {"tokenizer": tokenizer})
    names = {name for name in stored_bytes(one) if not name.endswith(".documents.parquet")}  # these have ids
    assert {name: renamed.bytes(name) for name in names} == {name: one.bytes(name) for name in names}


@pytest.mark.parametrize("workers", [slow(1), 2])
def test_a_killed_stage_redoes_only_what_was_not_committed(
    bench: Any, documents: Path, tokenizer: Artifact, workers: int
) -> None:
    spec, inputs = corpus_spec(documents, files_per_task=20), {"tokenizer": tokenizer}
    whole = bench.run("corpus", "whole", spec, inputs)
    with pytest.raises(Interrupted):
        bench.run("corpus", "killed", spec, inputs, workers=workers, attempt_class=StopsAfterOneUnit)
    assert not Artifact(bench.store, "corpus/killed").complete
    first = units_of(bench, "corpus/killed", "first")
    assert first  # of several workers, another one may have been as quick
    resumed = bench.run("corpus", "killed", spec, inputs, attempt="second", workers=workers)
    left = units_of(bench, "corpus/killed", "first") + units_of(bench, "corpus/killed", "second")
    assert not any(key.startswith(("documents-", "records-", "resolve-")) for key in left), "they are used up"
    assert stored_bytes(resumed) == stored_bytes(whole)
    assert resumed.manifest.metrics == whole.manifest.metrics


def test_another_seed_shuffles_differently_and_holds_out_the_same(
    bench: Any, documents: Path, tokenizer: Artifact
) -> None:
    one = bench.run("corpus", "one", corpus_spec(documents), {"tokenizer": tokenizer})
    other = bench.run("corpus", "other", {**corpus_spec(documents), "seed": 29}, {"tokenizer": tokenizer})
    assert tokens_of(one, "train") != tokens_of(other, "train")
    assert sorted(tokens_of(one, "validation")) == sorted(tokens_of(other, "validation"))


def test_addresses_are_replaced_unless_switched_off(bench: Any, documents: Path, tokenizer: Artifact) -> None:
    for index, path in enumerate(documents.glob("*.txt")):
        path.write_text(
            f"document {index}: write to jane.doe@mail.example or 8.8.8.{index}, not to 127.0.0.1"
        )
    plain = Tokenizer.from_file(str(tokenizer.local("tokenizer.json")))
    for name, pii in (("replaced", True), ("kept", False)):
        corpus = bench.run("corpus", name, corpus_spec(documents, pii=pii), {"tokenizer": tokenizer})
        texts = plain.decode_batch(tokens_of(corpus, "train"))
        assert all(("write to <email-pii> or <ip-pii>, not to 127.0.0.1" in text) is pii for text in texts)
        assert any("jane.doe@mail.example" in text for text in texts) is not pii


def test_addresses_are_replaced_in_the_languages_that_are_stated(
    bench: Any, tmp_path: Path, tokenizer: Artifact
) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    rows = [
        {"text": f"{number} in {language} to jane@mail.example", "language": language}
        for number in range(20)
        for language in ("deu", "fra", None)
    ]
    (folder / "0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pii = {"kinds": ["email"], "only": {"language": ["deu", "ita"]}}
    source = {"url": str(folder), "format": "jsonl"}
    spec = {"source": source, "process": {"holdout": 0.3, "pii": pii}, "seed": 1, "files_per_task": 1}
    corpus = bench.run("corpus", "c", spec, {"tokenizer": tokenizer})
    plain = Tokenizer.from_file(str(tokenizer.local("tokenizer.json")))
    texts = plain.decode_batch([*tokens_of(corpus, "train"), *tokens_of(corpus, "validation")])
    assert len(texts) == 60
    assert all(("<email-pii>" in text) is ("deu" in text) for text in texts)
    assert corpus.manifest.metrics["replaced"] == {"email": 20}


def test_probes_are_in_training_as_often_as_their_bucket_says(
    bench: Any, documents: Path, tokenizer: Artifact
) -> None:
    repeats = {"buckets": [0, 1, 5], "per_bucket": 3, "length": 12}
    corpus = bench.run("corpus", "c", corpus_spec(documents, repeats=repeats), {"tokenizer": tokenizer})
    stored = corpus.json("probes.json")
    assert stored["length"] == 12
    assert Counter(probe["bucket"] for probe in stored["probes"]) == {0: 3, 1: 3, 5: 3}
    counts = Counter(tuple(document[:12]) for document in tokens_of(corpus, "train"))
    for probe in stored["probes"]:
        assert len(probe["token_ids"]) == 12
        assert counts[tuple(probe["token_ids"])] == probe["bucket"]
        if probe["bucket"]:
            assert [*probe["token_ids"], 2] in tokens_of(corpus, "train")
    assert corpus.manifest.metrics["probes"] == 9
    assert corpus.manifest.metrics["train"]["documents"] == len(tokens_of(corpus, "train"))


def test_more_probes_than_documents_are_refused_with_the_numbers(
    bench: Any, documents: Path, tokenizer: Artifact
) -> None:
    repeats = {"buckets": [0, 1], "per_bucket": 40, "length": 12}
    with pytest.raises(SourceError, match=r"2 buckets of 40 probes need 80 training documents .* there are"):
        bench.run("corpus", "c", corpus_spec(documents, repeats=repeats), {"tokenizer": tokenizer})


def test_the_limit_counts_documents_over_all_files(bench: Any, documents: Path, tokenizer: Artifact) -> None:
    spec = corpus_spec(documents, files_per_task=3, holdout=0.5)
    spec["source"]["limit"] = 10
    corpus = bench.run("corpus", "c", spec, {"tokenizer": tokenizer}, workers=2)
    assert corpus.manifest.metrics["read"]["documents"] == 10
    assert corpus.manifest.metrics["read"]["bytes"] == sum(
        len((documents / f"{i:02d}.txt").read_bytes()) for i in range(10)
    )
    assert corpus.manifest.metrics["documents"] == 10


def test_a_holdout_that_holds_out_nothing_names_the_share_that_would(
    bench: Any, documents: Path, tokenizer: Artifact
) -> None:
    with pytest.raises(
        SourceError, match=r"holdout 1e-06 of 60 documents holds out none\. .* a share of 0\.\d+ or more"
    ):
        bench.run("corpus", "c", corpus_spec(documents, holdout=1e-6), {"tokenizer": tokenizer})


def test_a_source_of_which_nothing_is_left_says_where_it_went(
    bench: Any, documents: Path, tokenizer: Artifact
) -> None:
    filters = [{"filter": "length", "min_characters": 10**6}]
    with pytest.raises(
        SourceError,
        match=r"no document of .* is left: 60 documents \([\d,]+ bytes\) read, dropped: 60 length",
    ):
        bench.run("corpus", "c", corpus_spec(documents, filters=filters), {"tokenizer": tokenizer})


@pytest.mark.parametrize(
    "filters", [[], [{"filter": "length", "min_characters": 1}, {"filter": "exact-duplicates"}]]
)
def test_a_source_of_which_everything_is_rejected_says_why(
    bench: Any, tokenizer: Artifact, tmp_path: Path, filters: list[Any]
) -> None:
    for name, content in {"a.txt": b" \n", "b.txt": b"\xef\xbb\xbf", "c.txt": b"\xff"}.items():
        (tmp_path / name).write_bytes(content)
    message = r"no document of .* is left: 0 documents \(0 bytes\) read, rejected: 2 empty, 1 not_utf8\. Fix"
    with pytest.raises(SourceError, match=message):
        bench.run("corpus", "c", corpus_spec(tmp_path, filters=filters), {"tokenizer": tokenizer})
    sources = [{"url": str(tmp_path), "format": "text", "include": ["*.txt"]}]
    with pytest.raises(
        SourceError, match=r"no document in the files .*; rejected: 2 empty, 1 not_utf8\. Fix"
    ):
        bench.run("tokenizer", "t", {"sources": sources, "vocab_size": 512, "bytes_per_source": 9})


def test_a_source_of_nothing_but_long_documents_names_the_bound(
    bench: Any, tokenizer: Artifact, tmp_path: Path
) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "a.txt").write_text("\u00fc" * 51)  # 102 bytes
    (folder / "b.jsonl").write_text(json.dumps({"prompt": "q", "completion": "x" * 100}) + "\n")
    source = {"url": str(folder), "max_document_bytes": 101}
    texts, talks = source | {"format": "text", "include": ["*.txt"]}, source | {"format": "chat"}
    usual = corpus_spec(folder, holdout=0)
    message = r"no (document|conversation) .*rejected: 1 too_large.* Fix: raise max_document_bytes"
    for kind, spec in (
        ("corpus", usual | {"source": texts}),
        ("conversations", usual | {"source": talks | {"include": ["b.jsonl"]}}),
        ("tokenizer", {"sources": [texts], "vocab_size": 512, "bytes_per_source": 9}),
    ):
        with pytest.raises(SourceError, match=message):
            bench.run(kind, kind, spec, {"tokenizer": tokenizer})
    read = bench.run(
        "corpus", "c", usual | {"source": texts | {"max_document_bytes": 102}}, {"tokenizer": tokenizer}
    )
    assert read.manifest.metrics["rejected"] == {}


@pytest.mark.parametrize("workers", [1, slow(2)])
def test_a_missing_column_ends_the_stage_with_file_and_line(
    bench: Any, tmp_path: Path, tokenizer: Artifact, workers: int
) -> None:
    folder = tmp_path / "lines"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / f"{name}.jsonl").write_text(json.dumps({"body": "text"}) + "\n")
    spec = {"source": {"url": str(folder), "format": "jsonl"}, "process": {}, "seed": 1, "files_per_task": 1}
    with pytest.raises(StageError, match=r"\.jsonl', line 1: no column 'text'; there are body"):
        bench.run("corpus", "c", spec, {"tokenizer": tokenizer}, workers=workers)


def test_a_remote_store_gives_the_same_bytes(
    bench: Any, documents: Path, tokenizer: Artifact, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("APERTUS_CACHE", str(tmp_path / "cache"))
    here = bench.run("corpus", "c", corpus_spec(documents), {"tokenizer": tokenizer})
    remote = type(bench)(tmp_path / "remote", url=f"memory://{tmp_path.name}")
    source = {"url": str(documents), "format": "text"}
    same = remote.run(
        "tokenizer", "tokenizer0", {"sources": [source], "vocab_size": 512, "bytes_per_source": 100_000}
    )
    there = remote.run("corpus", "c", corpus_spec(documents), {"tokenizer": same})
    assert stored_bytes(there) == stored_bytes(here)
    tokens = [
        TokenFile(corpus.local("train-00000.bin"), corpus.local("train-00000.idx")).tokens.tolist()
        for corpus in (here, there)
    ]
    assert tokens[0] == tokens[1]
