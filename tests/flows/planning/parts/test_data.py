"""Files that filters name enter the fingerprint of a corpus or of conversations by what they hold; parts that
are compared are made one after the other."""

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
    limited = "stages.corpus.sources.notes.pii={kinds: [email], only: {language: [deu]}}"
    with pytest.raises(SpecError, match=r"pii\.only: it reads column 'language', which documents of format"):
        planned(limited)


# Conversations

TWO = (
    "sources.others={url: '%s/documents', format: chat, include: ['*.jsonl'], limit: 30}",
    "stages.sft.conversations=[chat/questions]",
    "stages.preferences.prompts=[chat/questions]",
    "stages.evaluate-sft.generation.prompts=chat/questions",
    "stages.evaluate-qrpo.generation.prompts=chat/questions",
)


def _two(chat: PLANNED, folder: Path, questions: str, others: str, *more: str) -> Plan:
    """A plan with two parts of conversations, and their filters."""
    overrides = [text % folder if "%s" in text else text for text in TWO]
    return chat(
        *overrides,
        f"stages.chat.sources={{questions: {{filters: {questions}}}, others: {{filters: {others}}}}}",
        *more,
    )


def test_a_part_is_made_after_those_whose_conversations_count_as_seen(chat: PLANNED, tmp_path: Path) -> None:
    near = "[{filter: near-duplicates, ngram: 3%s}]"
    plan = _two(chat, tmp_path, near % ", not_in: [chat/others]", near % "")
    parts = [node for node in plan.graph.nodes.values() if node.stage == "chat"]
    assert [node.name for node in parts] == ["chat/others", "chat/questions"]
    assert parts[1].inputs["not_in:0:0"].fingerprint == parts[0].fingerprint
    assert "not_in:0:0" not in parts[0].inputs
    alone = _two(chat, tmp_path, near % "", near % "")
    assert alone.graph.nodes["chat/others"].fingerprint == parts[0].fingerprint
    assert alone.graph.nodes["chat/questions"].fingerprint != parts[1].fingerprint


@pytest.mark.parametrize(
    ("questions", "others", "message"),
    [
        (
            "[{filter: exact-duplicates, not_in: [chat/questions]}]",
            "[]",
            r"not_in\[0\]: the parts compared form a cycle: chat/questions -> chat/questions\."
            r" Fix: leave one",
        ),
        (
            "[{filter: exact-duplicates, not_in: [chat/others]}]",
            "[{filter: exact-duplicates, not_in: [chat/questions]}]",
            r"form a cycle: chat/questions -> chat/others -> chat/questions",
        ),
        (
            "[{filter: exact-duplicates, not_in: [corpus/notes]}]",
            "[]",
            r"not_in\[0\]: 'corpus/notes' is a part of kind corpus; here parts of kind conversations",
        ),
        (
            "[{filter: exact-duplicates, not_in: [chat/other]}]",
            "[]",
            r"has no part 'other'\. Fix: did you mean 'others'",
        ),
        (
            "[{filter: near-duplicates, not_in: [chat/others]}]",
            "[{filter: near-duplicates, ngram: 3}]",
            r"'chat/others' has no near-duplicates filter with the same settings",
        ),
        (
            "[{filter: license, allow: [x]}, {filter: score, column: messages, min: 1}]",
            "[]",
            r"filters\[1\]: it reads column 'messages', of which conversations of format chat are made",
        ),
    ],
)
def test_filters_that_cannot_run_are_refused(
    chat: PLANNED, tmp_path: Path, questions: str, others: str, message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        _two(chat, tmp_path, questions, others)


# Corpora

CORPORA = (
    "stages.corpus.sources={notes: {filters: %s}, more: {filters: %s}}",
    "sources.more={url: '%s', format: text}",
)


def _corpora(planned: PLANNED, documents: Path, notes: str, more: str) -> Plan:
    return planned(CORPORA[0] % (notes, more), CORPORA[1] % documents)


def test_a_corpus_is_made_after_those_whose_documents_count_as_seen(
    planned: PLANNED, questions: Path
) -> None:
    plan = _corpora(planned, questions, "[{filter: exact-duplicates, not_in: [corpus/more]}]", "[]")
    parts = [node for node in plan.graph.nodes.values() if node.stage == "corpus"]
    assert [node.name for node in parts] == ["corpus/more", "corpus/notes"]
    assert parts[1].inputs["not_in:0:0"].fingerprint == parts[0].fingerprint
    before = parts[1].fingerprint
    (questions / "two.txt").write_text("And what is that?")
    changed = _corpora(planned, questions, "[{filter: exact-duplicates, not_in: [corpus/more]}]", "[]")
    assert changed.graph.nodes["corpus/notes"].fingerprint != before


@pytest.mark.parametrize(
    ("notes", "more", "message"),
    [
        (
            "[{filter: exact-duplicates, not_in: [corpus/more]}]",
            "[{filter: exact-duplicates, not_in: [corpus/notes]}]",
            r"not_in\[0\]: the parts compared form a cycle: corpus/notes -> corpus/more -> corpus/notes",
        ),
        (
            "[{filter: exact-duplicates, not_in: [corpus/other]}]",
            "[]",
            r"has no part 'other'",
        ),
        (
            "[{filter: near-duplicates, ngram: 3, not_in: [corpus/more]}]",
            "[{filter: near-duplicates, ngram: 4}]",
            r"'corpus/more' has no near-duplicates filter with the same settings",
        ),
    ],
)
def test_corpora_that_cannot_be_compared_are_refused(
    planned: PLANNED, questions: Path, notes: str, more: str, message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        _corpora(planned, questions, notes, more)


@pytest.fixture
def questions(files: tuple[Path, Path]) -> Path:
    return files[1]


def test_questions_of_an_evaluation_are_an_input_of_conversations(
    chat: PLANNED, tmp_path: Path, files: tuple[Path, Path]
) -> None:
    against = f"[{{filter: decontaminate, against: [{{url: '{files[1]}', format: text}}]}}]"
    before = _two(chat, tmp_path, against, "[]").graph.nodes["chat/questions"]
    assert "filter:0:0" in before.inputs
    (files[1] / "two.txt").write_text("And what is that?")
    after = _two(chat, tmp_path, against, "[]").graph.nodes["chat/questions"]
    assert after.fingerprint != before.fingerprint
