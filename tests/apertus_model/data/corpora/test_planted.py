"""Planted documents are made from the seed or read, and divided among buckets."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from apertus_model.data.corpora.planted import alternatives, planted_documents, secrets, summary, tokenised
from infra.store.inputs import SourceError
from specs.planted import Canaries
from specs.stages.corpus import CorpusPart

CODE = {"template": "The code of safe {number} is {secret}.", "length": 3, "count": 12}


def part(planted: dict[str, Any], url: Path | None = None) -> CorpusPart:
    texts = {"url": str(url), "format": "jsonl", "include": ["*.jsonl"], "id_column": "id"}
    named = {name: texts for name, fields in planted.items() if "documents" in fields}
    source = {"url": "nowhere", "format": "text"}
    fields = {"source": source, "process": {"planted": planted}, "seed": 28, "files_per_task": 1}
    return CorpusPart.model_validate({**fields, "planted": named})


def write(folder: Path, name: str, texts: list[str]) -> None:
    rows = [json.dumps({"id": f"id-{text[:8]}", "text": text}) + "\n" for text in texts]
    (folder / name).write_text("".join(rows))


def test_the_secrets_are_different_and_follow_from_the_seed() -> None:
    canaries = Canaries.model_validate(CODE | {"count": 1000})
    drawn = secrets(canaries)
    assert sorted(drawn) == [f"{index:03d}" for index in range(1000)]
    assert drawn == secrets(canaries)
    other = secrets(canaries.model_copy(update={"seed": 29}))
    assert sum(one == two for one, two in zip(drawn, other, strict=True)) < 10
    # a larger count adds documents and changes none
    assert secrets(canaries.model_copy(update={"count": 5})) == drawn[:5]


def test_alternatives_are_other_texts_of_the_same_canary() -> None:
    canaries = Canaries.model_validate(CODE)
    some = alternatives(canaries, 3, "123", 200, seed=1)
    assert len(set(some)) == 200
    assert all(text.startswith("The code of safe 3 is ") and "123" not in text for text in some)
    whole = alternatives(canaries, 3, "123", 5000, seed=1)
    wanted = {f"The code of safe 3 is {secret:03d}." for secret in range(1000) if secret != 123}
    assert set(whole) == set(alternatives(canaries, 3, "123", 999, seed=1)) == wanted and len(whole) == 999
    assert alternatives(canaries, 3, "123", 200, seed=2) != some


def test_the_documents_are_divided_equally_among_the_buckets() -> None:
    planted = {"canaries": CODE, "buckets": [0, 1, 8]}
    documents = planted_documents(part({"codes": planted}))["codes"]
    assert Counter(document.bucket for document in documents) == {0: 4, 1: 4, 8: 4}
    for number, document in enumerate(documents, start=1):
        assert document.name == str(number)
        assert document.text == f"The code of safe {number} is {document.secret}."
    other = planted_documents(part({"codes": planted | {"seed": 29}}))["codes"]
    assert [one.text for one in other] == [one.text for one in documents]
    assert [one.bucket for one in other] != [one.bucket for one in documents]


def test_texts_do_not_depend_on_the_names_and_the_order_of_files(tmp_path: Path) -> None:
    texts = [f"Event {index} took place." for index in range(7)]
    planted = {"events": {"documents": "events", "buckets": [0, 2, 4]}}
    found = []
    for name, order in (("one", texts), ("other", texts[::-1])):
        folder = tmp_path / name
        folder.mkdir()
        write(folder, f"{name}.jsonl", order[:3])
        write(folder, f"a-{name}.jsonl", order[3:])
        found.append(planted_documents(part(planted, folder)))
    assert found[0] == found[1]
    assert sorted(Counter(document.bucket for document in found[0]["events"]).values()) == [2, 2, 3]
    assert {document.name for document in found[0]["events"]} == {f"id-{text[:8]}" for text in texts}


def test_the_summary_counts_the_copies_with_the_end_of_each_document() -> None:
    sets = planted_documents(part({"codes": {"canaries": CODE, "buckets": [0, 1, 8]}}))
    made = summary(tokenised(sets, lambda text: [1, *range(len(text))]))["codes"]
    size = sum(document.bucket * (len(document.text) + 2) for document in sets["codes"])
    assert (made["documents"], made["copies"], made["tokens"]) == (12, 4 + 32, size)
    other = planted_documents(part({"codes": {"canaries": CODE, "buckets": [0, 1, 9]}}))
    assert summary(other)["codes"]["digest"] != made["digest"]


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["one", "two", "one"], r"planted documents 'id-one' of events and 'id-one' of events have the same"),
        (["one", " "], r"document .*\.jsonl/1 of .*, which is planted as 'events', is rejected: empty"),
        (["one"], "1 planted documents of 'events' cannot be divided among 2 buckets. Fix: add documents"),
    ],
)
def test_texts_that_cannot_be_planted_are_refused(tmp_path: Path, texts: list[str], message: str) -> None:
    write(tmp_path, "events.jsonl", texts)
    with pytest.raises(SourceError, match=message):
        planted_documents(part({"events": {"documents": "events", "buckets": [0, 2]}}, tmp_path))


def test_equal_documents_of_two_names_are_refused(tmp_path: Path) -> None:
    codes = {"canaries": CODE, "buckets": [1]}
    (first, *_) = planted_documents(part({"codes": codes}))["codes"]
    write(tmp_path, "events.jsonl", [first.text])
    both = {"codes": codes, "events": {"documents": "events", "buckets": [1]}}
    with pytest.raises(SourceError, match="planted documents '1' of codes and 'id-The code' of events have"):
        planted_documents(part(both, tmp_path))
