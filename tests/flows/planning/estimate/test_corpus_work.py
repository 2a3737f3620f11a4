"""What making a corpus takes, by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from flows.planning.estimate.corpus_work import RATES, SOURCES, Amount, core_seconds
from flows.planning.plan import Plan
from specs.filters import GLOBAL_FILTERS, FilterSpec
from tests.flows.conftest import finish

Planned = Callable[..., Plan]
ABSENT = ("sources.notes.url=absent", "sources.notes.declared={tokens: 15T tokens}")


def corpus(plan: Plan) -> dict[str, Any]:
    found: dict[str, Any] = plan.to_json()["estimates"]["corpora"]["corpus"]
    return found


def test_the_time_is_that_of_all_steps_one_after_the_other() -> None:
    seconds = core_seconds(Amount(8e9, 4e9), ["near-duplicates", "pii"])
    assert seconds == pytest.approx(
        8e9 / RATES["tokenise"] + 8e9 / RATES["near-duplicates"] + 8e9 / RATES["pii"] + 4e9 / RATES["shuffle"]
    )


def test_fifteen_trillion_declared_tokens_are_counted_by_hand(planned: Planned) -> None:
    """60 TB of text, four bytes a token, in files of 500 MB; 30 TB of tokens of two bytes move five times."""
    plan = planned(*ABSENT, "stages.corpus.sources.notes.pii=false", "stages.corpus.launch.workers.count=4")
    found = corpus(plan)
    hours = (60e12 / RATES["tokenise"] + 30e12 / RATES["shuffle"]) / 3600
    assert found["core_hours"] == pytest.approx(hours)
    assert found["seconds"] == pytest.approx(hours * 3600 / 4)
    assert found["sizes_source"] == "declared" and found["not_counted"] is None
    assert found["tasks"] == 120_000 / 200
    numbers = ("text_bytes", "tokens", "moved_bytes", "temporary_bytes")
    assert [found[name] for name in numbers] == [60e12, 15e12, 60e12 + 5 * 30e12, 30e12]
    totals = plan.estimates.totals()
    assert totals["core_hours"] == found["core_hours"]
    assert (totals["corpus_moved_bytes"], totals["corpus_temporary_bytes"]) == (210e12, 30e12)


def test_signatures_move_and_are_stored_by_the_document(planned: Planned) -> None:
    near = "stages.corpus.sources.notes.filters=[{filter: near-duplicates, buckets: 10}]"
    declared = "sources.notes.declared={tokens: 15T tokens, documents: 20_000_000_000}"
    bare, signed = corpus(planned(*ABSENT, declared)), corpus(planned(*ABSENT, declared, near))
    signatures = 8 * 10 * 20_000_000_000
    assert signed["moved_bytes"] - bare["moved_bytes"] == 2 * signatures
    assert signed["temporary_bytes"] - bare["temporary_bytes"] == signatures
    assert signed["core_hours"] - bare["core_hours"] == pytest.approx(60e12 / RATES["near-duplicates"] / 3600)
    assert signed["not_counted"] == "documents that filters drop"


def test_files_count_by_their_sizes_and_a_stored_corpus_as_it_is(planned: Planned, tmp_path: Path) -> None:
    plan = planned("stages.corpus.files_per_task=4")
    files = list((tmp_path / "documents").glob("*.txt"))
    found = corpus(plan)
    assert found["text_bytes"] == sum(path.stat().st_size for path in files)
    assert (found["tasks"], found["sizes_source"]) == (-(-len(files) // 4), "files")
    assert found["tokens"] == round(found["text_bytes"] / 4)
    finish(plan, "tokenizer", metrics={"bytes_per_token": [2.0, 3.0]})  # type: ignore[dict-item]  # a list
    assert corpus(planned())["tokens"] == round(found["text_bytes"] / 2.5)
    read = {"bytes": 5000, "documents": 7, "characters": 4000}
    finish(plan, "corpus/notes", metrics={"read": read, "tokens": 900})  # type: ignore[dict-item]
    made = corpus(planned("stages.corpus.files_per_task=4"))
    assert (made["text_bytes"], made["tokens"], made["sizes_source"]) == (5000, 900, "measured")


def test_conversations_are_counted_by_hand_before_and_after_they_are_made(chat: Planned) -> None:
    """40 conversations of 3,000 bytes; tokens of two bytes, a mask of one and the text move three times."""
    near = "stages.chat.sources.questions.filters=[{filter: near-duplicates, buckets: 10}]"
    stated = ("sources.questions.url=absent", "sources.questions.declared={documents: 40}", near)
    found = chat(*stated, "stages.chat.launch.workers.count=2").to_json()["estimates"]["corpora"]["chat"]
    text, tokens, signatures = 40 * 3000, 40 * 3000 / 4, 8 * 10 * 40
    written = text + tokens * (2 + 1)
    numbers = ("text_bytes", "tokens", "moved_bytes", "temporary_bytes")
    assert [found[name] for name in numbers] == [
        text, tokens, text + 3 * written + 2 * signatures, written + signatures,
    ]  # fmt: skip
    seconds = text / RATES["conversations"] + text / RATES["near-duplicates"]
    assert (found["core_hours"], found["seconds"]) == (
        pytest.approx(seconds / 3600),
        pytest.approx(seconds / 2),
    )
    assert (found["sizes_source"], found["not_counted"]) == ("declared", "documents that filters drop")
    plan = chat()
    made = {"read": {"conversations": 50}, "conversations": 40, "tokens": 800}
    finish(plan, "chat/questions", metrics=made)  # type: ignore[arg-type]  # as stored
    found = chat().to_json()["estimates"]["corpora"]["chat"]
    assert (found["text_bytes"], found["tokens"], found["sizes_source"]) == (
        800 * 4 * 50 / 40,
        800,
        "measured",
    )


def test_the_time_of_workers_that_the_recipe_does_not_state_is_unknown(planned: Planned) -> None:
    assert corpus(planned())["seconds"] is None


def test_every_filter_has_a_measured_rate() -> None:
    names = {kind.model_fields["filter"].annotation.__args__[0] for kind in get_args(get_args(FilterSpec)[0])}  # type: ignore[union-attr]
    hashed = {kind.model_fields["filter"].annotation.__args__[0] for kind in GLOBAL_FILTERS}  # type: ignore[union-attr]
    assert names - RATES.keys() <= hashed & {"exact-duplicates"}
    assert SOURCES[-1] == "files"
