"""Parallel text from rows and from aligned files, and text that is not parallel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from apertus_model.data.rows import Rows
from apertus_model.stages.parallel_text import ParallelText, read_parallel
from infra.store import Artifact
from infra.store.inputs import SourceError
from specs.stages.evaluate_tokenizers import ParallelTextPart
from tests.apertus_model.stages.conftest import PARALLEL

ROWS = [
    ("2", "de", "zwei"),
    ("1", "de", "eins"),
    ("1", "en", "one"),
    ("2", "en", "two"),
]


def write_rows(folder: Path, rows: list[tuple[Any, Any, Any]], name: str = "lines.jsonl") -> dict[str, Any]:
    """A source of rows with a language."""
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps(dict(zip(("id", "language", "text"), row, strict=True))) + "\n" for row in rows)
    (folder / name).write_text(text)
    return {"url": str(folder), "format": "jsonl", "id_column": "id", "metadata": ["language"]}


def write_files(folder: Path, files: dict[str, str]) -> dict[str, Any]:
    """A source of a file for each language."""
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return {"url": str(folder), "format": "text"}


def read(*sources: dict[str, Any], **fields: Any) -> ParallelText:
    spec = {"language_column": "language", "languages": [], "lines": None, "incomplete": "refuse"} | fields
    return read_parallel(ParallelTextPart.model_validate({"sources": sources, **spec}))


def test_rows_are_joined_by_their_ids_in_the_order_of_the_source(tmp_path: Path) -> None:
    found = read(write_rows(tmp_path / "rows", ROWS))
    assert found == ParallelText(
        ["de", "en"], {"2": {"de": "zwei", "en": "two"}, "1": {"de": "eins", "en": "one"}}, 0
    )
    assert list(found.lines) == ["2", "1"]


def test_a_file_for_each_language_is_aligned_by_its_lines(tmp_path: Path) -> None:
    source = write_files(
        tmp_path / "dev", {"eng_Latn.dev": "one\ntwo\n", "deu_Latn.dev": "eins\r\n zwei\r\n"}
    )
    assert read(source) == ParallelText(
        ["deu_Latn", "eng_Latn"],
        {"1": {"deu_Latn": "eins", "eng_Latn": "one"}, "2": {"deu_Latn": " zwei", "eng_Latn": "two"}},
        0,
    )


def test_files_of_rows_without_a_language_are_languages_and_sources_add_up(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows", [("a", "x", "one"), ("b", "x", "two")], "en.jsonl") | {
        "metadata": []
    }
    more = write_rows(tmp_path / "more", [("b", "fr", "deux"), ("a", "fr", "un")])
    assert read(rows, more).lines == {"a": {"en": "one", "fr": "un"}, "b": {"en": "two", "fr": "deux"}}


def test_incomplete_lines_are_left_out_for_all_languages_where_that_is_asked(tmp_path: Path) -> None:
    rows = [*ROWS, ("3", "de", "drei"), ("4", "fr", "quatre"), ("5", "en", "five"), ("5", "de", "fünf")]
    source = write_rows(tmp_path / "rows", rows)
    found = read(source, languages=["de", "en"], incomplete="leave_out")
    assert (list(found.lines), found.left_out) == (["2", "1", "5"], 1)
    assert list(read(source, languages=["de", "en"], incomplete="leave_out", lines=2).lines) == ["2", "1"]
    with pytest.raises(SourceError, match=r"of 4 lines, 'en' has 3 \(it lacks '3'\)\. Fix: add the lines"):
        read(source, languages=["de", "en"])


def test_a_line_of_a_mebibyte_is_a_line(tmp_path: Path) -> None:
    long = "ä " * 2**19
    source = write_files(tmp_path / "dev", {"en": f"a\n{long}\n", "de": f"{long}\nb"})
    found = read(source).lines
    assert (found["1"]["de"], found["2"]["en"]) == (long, long)
    rows = read(write_rows(tmp_path / "rows", [*ROWS, ("3", "de", long), ("3", "en", "x")]))
    assert rows.lines["3"]["de"] == long


@pytest.mark.parametrize(
    ("rows", "fields", "message"),
    [
        ([*ROWS, ("1", "fr", "un")], {}, r"of 2 lines, 'fr' has 1 \(it lacks '2'\)"),
        (
            [*ROWS, ("1", "fr", "un")],
            {"incomplete": "leave_out"},
            r"1 of 2 lines are there in each of 3 languages, and an interval needs two: 'fr' has 1",
        ),
        (ROWS, {"lines": 3}, r"2 of 2 lines .*, and lines: 3 are asked for: none is incomplete"),
        (ROWS, {"languages": ["de", "eng"]}, r"no line is in 'eng', .* Fix: did you mean 'en'\?"),
        ([*ROWS, ("1", "en", "one")], {}, r"lines\.jsonl' of .*, row 5: language 'en' has line '1' twice"),
        ([*ROWS, ("3", "en", " ")], {}, r"row 5: it has no usable text \(empty\)"),
        ([*ROWS, (None, "en", "x")], {}, r"row 5: column 'id' is empty"),
        ([*ROWS, ("3", None, "x")], {}, r"row 5: None is not the name of a language"),
        ([*ROWS, ("3", "low", "x")], {}, r"row 5: 'low' is not the name of a language"),
        ([*ROWS, ("3", "a/b", "x")], {}, r"row 5: 'a/b' is not the name of a language"),
    ],
)
def test_rows_that_are_not_parallel_are_named(
    tmp_path: Path, rows: list[tuple[Any, Any, Any]], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(SourceError, match=message):
        read(write_rows(tmp_path / "rows", rows), **fields)


def test_a_file_without_the_column_of_languages_is_named(tmp_path: Path) -> None:
    source = write_rows(tmp_path / "rows", ROWS) | {"metadata": ["lang"]}
    with pytest.raises(
        SourceError, match=r"lines\.jsonl' of .*, row 1: .*no column 'lang'; there are id, language"
    ):
        read(source, language_column="lang")


def test_an_empty_line_of_a_file_is_named_and_so_is_a_missing_one(tmp_path: Path) -> None:
    source = write_files(tmp_path / "dev", {"en.txt": "one\n\nthree\n", "de.txt": "eins\nzwei\ndrei\n"})
    with pytest.raises(SourceError, match=r"'en\.txt' of .*, line 2: it is empty"):
        read(source)
    write_files(tmp_path / "dev", {"en.txt": "one\ntwo\n"})
    with pytest.raises(SourceError, match=r"of 3 lines, 'en' has 2 \(it lacks '3'\)"):
        read(source)


def test_lines_are_stored_with_their_languages_and_whether_these_have_words(text: Artifact) -> None:
    facts, metrics = text.manifest.facts, text.manifest.metrics
    assert (facts["languages"], facts["with_words"]) == (["de", "en", "ja"], ["de", "en"])
    assert (metrics["lines"], metrics["languages"], metrics["left_out"]) == (3, 3, 0)
    assert metrics["bytes"]["ja"] == len("".join(PARALLEL["ja"]).encode())
    rows = [{"id": str(number + 1), "texts": {one: PARALLEL[one][number] for one in facts["languages"]}}
            for number in range(3)]  # fmt: skip
    assert list(Rows(text)) == rows
