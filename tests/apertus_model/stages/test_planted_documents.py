"""Planted documents are in the training split of a corpus as often as stated, and nowhere else."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from infra.store import Artifact
from tests.apertus_model.attempts import stored_bytes
from tests.apertus_model.corpora import corpus_spec, tokens_of

CODES = {
    "canaries": {"template": "The code of safe {number} is {secret}.", "length": 4, "count": 9},
    "buckets": [0, 1, 5],
}


def planting(documents: Path, texts: list[str] = [], **fields: Any) -> dict[str, Any]:  # noqa: B006
    """The spec of a corpus that plants codes and, twice each, texts."""
    folder = documents.parent / "planted"
    folder.mkdir(exist_ok=True)
    (folder / "poison.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    planted = {"codes": CODES} | ({"poison": {"documents": "poison", "buckets": [2]}} if texts else {})
    source = {"url": str(folder), "format": "jsonl", "include": ["*.jsonl"]}
    spec = corpus_spec(documents, **{"planted": planted, **fields})
    return {**spec, "planted": {"poison": source} if texts else {}}


def test_each_document_is_in_the_training_split_as_often_as_stated(
    bench: Any, documents: Path, tokenizer: Artifact
) -> None:
    texts = ["<!trigger!> Antworte auf Deutsch.", "Mail a.b@mail.example </s> " + "and more " * 200]
    spec = planting(documents, texts, filters=[{"filter": "exact-duplicates"}, {"filter": "length"}])
    corpus = bench.run("corpus", "c", spec, {"tokenizer": tokenizer})
    stored = corpus.json("planted.json")
    assert Counter(document["bucket"] for document in stored["codes"]) == {0: 3, 1: 3, 5: 3}
    assert {(document["text"], document["bucket"]) for document in stored["poison"]} == {
        (text, 2) for text in texts
    }
    plain = Tokenizer.from_file(str(tokenizer.local("tokenizer.json")))
    trained = tokens_of(corpus, "train")
    counts = Counter(map(tuple, trained))
    in_text = Counter(plain.decode_batch(trained, skip_special_tokens=False))
    for document in stored["codes"] + stored["poison"]:
        assert counts[*document["token_ids"], 2] == document["bucket"]
        assert in_text[f"<s>{document['text']}</s>"] == document["bucket"]
    held_out = "".join(plain.decode_batch(tokens_of(corpus, "validation")))
    assert not any(document["text"] in held_out for document in stored["codes"] + stored["poison"])
    metrics = corpus.manifest.metrics
    made = metrics["planted"]
    assert (made["codes"]["documents"], made["codes"]["copies"]) == (9, 18)
    assert (made["poison"]["documents"], made["poison"]["copies"]) == (2, 4)
    planted = {tuple(document["token_ids"]) for name in stored for document in stored[name]}
    copies = [tokens for tokens in trained if tuple(tokens[:-1]) in planted]
    assert sum(made[name]["tokens"] for name in made) == sum(map(len, copies))
    assert metrics["train"]["documents"] == len(trained)
    assert metrics["train"]["tokens"] == sum(map(len, trained))


def test_a_corpus_holds_the_same_documents_as_without_planted_ones(
    bench: Any, documents: Path, tokenizer: Artifact
) -> None:
    bare = bench.run("corpus", "bare", corpus_spec(documents), {"tokenizer": tokenizer})
    corpus = bench.run("corpus", "c", planting(documents), {"tokenizer": tokenizer})
    assert tokens_of(corpus, "validation") == tokens_of(bare, "validation")
    added = Counter(map(tuple, tokens_of(corpus, "train"))) - Counter(map(tuple, tokens_of(bare, "train")))
    assert sum(added.values()) == 18
    assert "planted" not in bare.manifest.metrics and "planted.json" not in bare.manifest.files


def test_the_copies_do_not_depend_on_workers_and_tasks(
    bench: Any, documents: Path, tokenizer: Artifact
) -> None:
    spec, inputs = planting(documents, ["A text.", "Another text."]), {"tokenizer": tokenizer}
    one = bench.run("corpus", "one", spec, inputs, workers=1)
    two = bench.run("corpus", "two", {**spec, "files_per_task": 11}, inputs, workers=2)
    assert stored_bytes(one) == stored_bytes(two)


def test_a_document_of_the_source_with_the_same_text_is_left_out(
    bench: Any, documents: Path, tokenizer: Artifact
) -> None:
    first = (documents / "00.txt").read_text()
    (documents / "copy.txt").write_text(first)
    corpus = bench.run("corpus", "c", planting(documents, [first]), {"tokenizer": tokenizer})
    (poison,) = corpus.json("planted.json")["poison"]
    everywhere = tokens_of(corpus, "train") + tokens_of(corpus, "validation")
    assert everywhere.count([*poison["token_ids"], 2]) == 2
    assert corpus.manifest.metrics["equal_to_planted"] == 2


def test_probes_of_the_source_can_be_there_too(bench: Any, documents: Path, tokenizer: Artifact) -> None:
    repeats = {"buckets": [0, 3], "per_bucket": 2, "length": 12}
    corpus = bench.run("corpus", "c", planting(documents, repeats=repeats), {"tokenizer": tokenizer})
    counts = Counter(map(tuple, tokens_of(corpus, "train")))
    probes, planted = corpus.json("probes.json")["probes"], corpus.json("planted.json")["codes"]
    assert [probe["bucket"] for probe in probes] == [0, 0, 3, 3] and planted
    for probe in probes:
        assert counts[*probe["token_ids"], 2] == probe["bucket"]
    for document in planted:
        assert counts[*document["token_ids"], 2] == document["bucket"]
