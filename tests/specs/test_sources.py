"""What a source may say, and what the stages may ask of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from specs.recipe import load
from specs.sources import SourceSpec
from tests.recipes import edit, problems, write_recipe

TOKENS = "format: megatron, tokenizer: trusted"


@pytest.mark.parametrize(
    ("format_", "fields", "message"),
    [
        ("text", {"text_column": "body"}, "text_column belongs to jsonl and parquet and arrow; this is text"),
        ("warc", {"metadata": ["url"]}, "metadata belongs to jsonl and parquet and arrow; this is warc"),
        ("jsonl", {"html": "raw"}, "html belongs to warc; this is jsonl"),
        ("parquet", {"tokenizer": "trusted"}, "tokenizer belongs to megatron; this is parquet"),
        ("jsonl", {"metadata": ["url", "url"]}, "names a column twice"),
        ("jsonl", {"metadata": ["text"]}, "or the text column 'text'"),
        ("text", {"reader": "package:name"}, "reader belongs to documents and conversations; this is text"),
        ("chat", {"version": 1}, "version belongs to documents and conversations; this is chat"),
        ("documents", {}, "set reader: package.module:name and version: 1"),
        ("conversations", {"reader": "package:name"}, "set reader: package.module:name and version: 1"),
        ("documents", {"version": 1}, "set reader: package.module:name and version: 1"),
        ("documents", {"reader": "package.name", "version": 1}, "reader\n  String should match pattern"),
        ("documents", {"reader": "a:b\n", "version": 1}, "reader\n  String should match pattern"),
        ("documents", {"reader": "package:name", "version": 0}, "greater than or equal to 1"),
        ("megatron", {}, "tokens do not say what made them: set tokenizer"),
        (
            "megatron",
            {"tokenizer": "sha256:abc"},
            "set tokenizer: sha256:<digest of its tokenizer.json>, or trusted",
        ),
    ],
)
def test_fields_that_do_not_belong_to_the_format_are_refused(
    format_: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        SourceSpec(url="folder", format=format_, **fields)  # type: ignore[arg-type]


def test_a_reader_enters_the_fingerprint_with_its_version_and_is_not_imported() -> None:
    source = SourceSpec(url="folder", format="documents", reader="antigravity:fly", version=3)
    assert source.identity_fields() == {"format": "documents", "reader": "antigravity:fly", "version": 3}
    assert "antigravity" not in sys.modules


def test_a_dataset_of_the_hub_needs_a_revision() -> None:
    with pytest.raises(ValidationError, match="without a revision"):
        SourceSpec(url="hf://datasets/owner/name/data", format="parquet")
    with pytest.raises(ValidationError, match="without a revision"):
        SourceSpec(url="hf://datasets/owner/name", format="parquet")
    for url in ("hf://datasets/owner/name@main", "hf://datasets/owner/name@refs/convert/parquet/default"):
        assert SourceSpec(url=url, format="parquet").url == url


def test_formats_in_mixed_folders_have_default_globs() -> None:
    assert SourceSpec(url="folder", format="arrow").include == ["**/*.arrow"]
    assert SourceSpec(url="folder", format="arrow", include=["train/*"]).include == ["train/*"]
    assert SourceSpec(url="folder", format="text").include == ["**/*"]


def test_new_fields_at_their_neutral_values_change_no_fingerprint() -> None:
    assert SourceSpec(url="folder", format="jsonl").identity_fields() == {"format": "jsonl"}
    stated = SourceSpec(url="folder", format="jsonl", id_column="id", metadata=["url"])
    assert stated.identity_fields() == {"format": "jsonl", "id_column": "id", "metadata": ["url"]}


@pytest.mark.parametrize(
    ("process", "message"),
    [
        (
            "{holdout: 0.2}",
            "stages.corpus.sources.notes.pii: source 'notes' is already tokenised; pii would need its text",
        ),
        (
            "{holdout: 0.2, pii: false, filters: [{filter: length}]}",
            (
                "stages.corpus.sources.notes.filters: source 'notes' is already tokenised; filters would need"
                " its text"
            ),
        ),
    ],
)
def test_text_processing_is_refused_for_tokenised_sources(tmp_path: Path, process: str, message: str) -> None:
    text = problems(edit(write_recipe(tmp_path), ("format: text", TOKENS), ("{holdout: 0.2}", process)))
    assert message in text
    assert "Fix: set pii: false, and no other step" in text


def test_a_tokenizer_is_not_trained_on_tokens(tmp_path: Path) -> None:
    text = problems(edit(write_recipe(tmp_path), ("format: text", TOKENS)))
    assert (
        "stages.tokenizer.sources[0]: source 'notes' is already tokenised; a tokenizer is trained on text"
        in text
    )


def test_tokenised_source_without_text_processing_is_accepted(tmp_path: Path) -> None:
    folder = tmp_path / "imported"
    path = edit(
        write_recipe(tmp_path),
        ("format: text", TOKENS),
        ("sources: [notes]", f"path: {folder}"),
        ("{holdout: 0.2}", "{holdout: 0.2, pii: false}"),
    )
    assert load(path).sources["notes"].format == "megatron"


def test_two_sources_of_one_name_are_an_error_with_both_lines(tmp_path: Path) -> None:
    text = problems(
        edit(write_recipe(tmp_path), ("sources:\n", "sources:\n  notes: {url: other, format: text}\n"))
    )
    assert "notes" in text
    assert "is already on line 3" in text
