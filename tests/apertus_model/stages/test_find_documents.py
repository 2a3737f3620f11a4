"""What became of a document of a corpus that the stage has made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from apertus_model.data.corpora.duplicates import text_hash
from apertus_model.data.tokens.megatron import TokenFile
from flows.inspection.corpus import find_documents
from infra.store import Artifact

WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


@pytest.fixture
def corpus(bench: Any, tmp_path: Path, tokenizer: Artifact) -> tuple[Artifact, list[dict[str, Any]]]:
    """Twenty documents, of which the third is too short and the last repeats the first."""
    texts = [" ".join(WORDS[(i + j * (i % 3)) % 10] for j in range(9)) + f" {i}" for i in range(20)]
    texts[2], texts[19] = "short", texts[0]
    rows = [
        {"id": f"a.jsonl/{i}", "url": f"https://a.example/{i}", "text": text} for i, text in enumerate(texts)
    ]
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = {
        "source": {"url": str(folder), "format": "jsonl", "metadata": ["url"]},
        "process": {
            "holdout": 0.2,
            "filters": [{"filter": "length", "min_characters": 9}, {"filter": "exact-duplicates"}],
        },
        "seed": 28,
        "files_per_task": 1,
    }
    return bench.run("corpus", "c", spec, {"tokenizer": tokenizer}), rows


def test_a_kept_document_is_found_by_id_url_and_hash_at_its_place_in_the_tokens(
    corpus: tuple[Artifact, list[dict[str, Any]]], tokenizer: Artifact
) -> None:
    made, rows = corpus
    plain = Tokenizer.from_file(str(tokenizer.local("tokenizer.json")))
    splits = set()
    for row in (row for row in rows if row["text"] not in ("short", rows[0]["text"])):
        hashed = f"{text_hash(row['text']):016x}"
        (found,) = find_documents(made, row["url"])
        assert (found["hash"], found["id"], found["url"]) == (hashed, row["id"], row["url"])
        assert find_documents(made, row["id"]) == find_documents(made, hashed) == [found]
        file = TokenFile(made.local(found["file"]))
        assert plain.decode(file[found["row"]].tolist()) == row["text"]
        splits.add(found["became"])
        assert found["file"].startswith(found["became"])
        assert found["tokens"] == len(file[found["row"]])
        assert found["offset"] == sum(len(file[i]) for i in range(found["row"]))
    assert splits == {"train", "validation"}


def test_a_removed_document_is_found_with_the_filter_and_the_reason(
    corpus: tuple[Artifact, list[dict[str, Any]]],
) -> None:
    made, rows = corpus
    (short,) = find_documents(made, rows[2]["url"])
    assert find_documents(made, "a.jsonl/2") == [short] and short["url"] == rows[2]["url"]
    assert short["became"] == "length" and short["hash"] == f"{text_hash('short'):016x}"
    assert "9" in short["reason"]
    both = find_documents(made, f"{text_hash(rows[0]['text']):016x}")
    assert [row["became"] in ("train", "validation") for row in both] == [True, False]
    assert both[1]["became"] == "exact-duplicates" and both[1]["reason"].startswith("the same text as ")
    assert {row["id"] for row in both} == {"a.jsonl/0", "a.jsonl/19"}
    assert find_documents(made, "0123456789abcdef") == find_documents(made, "a.jsonl") == []
