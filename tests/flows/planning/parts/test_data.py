"""Files that filters name enter the fingerprint of a corpus by what they hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flows.planning.plan import Plan
from specs.errors import SpecError

PLANNED = Callable[..., Plan]


def _corpus(planned: PLANNED, domains: Path, questions: Path) -> str:
    filters = (
        f"[{{filter: robots, domains: '{domains}'}}, {{filter: decontaminate, against: [{{url: '{questions}',"
        " format: text}]}]"
    )
    overrides = (f"stages.corpus.sources.notes.filters={filters}", "sources.notes.format=jsonl")
    return planned(*overrides).graph.nodes["corpus/notes"].fingerprint


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "domains.txt").write_text("a.example\n")
    (tmp_path / "questions").mkdir()
    (tmp_path / "questions" / "one.txt").write_text("What is it?")
    return tmp_path / "domains.txt", tmp_path / "questions"


def test_file_of_a_filter_is_fingerprinted_by_content(
    planned: PLANNED, files: tuple[Path, Path], tmp_path: Path
) -> None:
    domains, questions = files
    before = _corpus(planned, domains, questions)
    domains.rename(tmp_path / "moved.txt")
    questions.rename(tmp_path / "elsewhere")
    domains, questions = tmp_path / "moved.txt", tmp_path / "elsewhere"
    assert _corpus(planned, domains, questions) == before
    domains.write_text("a.example\nb.example\n")
    more_domains = _corpus(planned, domains, questions)
    assert more_domains != before
    (questions / "two.txt").write_text("And what is that?")
    assert _corpus(planned, domains, questions) not in (before, more_domains)


def test_a_filter_whose_file_is_missing_is_named_before_anything_starts(
    planned: PLANNED, files: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(
        SpecError, match=r"stages\.corpus\.sources\.notes\.filters\[0\]: there is nothing at .*nowhere\.txt"
    ):
        _corpus(planned, tmp_path / "nowhere.txt", files[1])


def test_a_filter_on_columns_that_the_format_does_not_have_is_refused(planned: PLANNED) -> None:
    filters = (
        "stages.corpus.sources.notes.filters=[{filter: sample, rate: 0.5}, {filter: score, column: stars,"
        " min: 2}]"
    )
    with pytest.raises(
        SpecError, match=r"filters\[1\]: it reads column 'stars', which documents of format text do not have"
    ):
        planned(filters)
    assert planned(filters, "sources.notes.format=jsonl").graph.nodes["corpus/notes"]
