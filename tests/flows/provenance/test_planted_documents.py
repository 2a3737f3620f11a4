"""Planted documents are named wherever somebody looks for what a model was trained on."""

from __future__ import annotations

import io
from collections.abc import Callable

from rich.console import Console

from apertus_model.model_card import model_card
from flows.cli.tables import lineage as tables
from flows.planning.plan import Plan
from flows.provenance import lineage
from flows.report import render
from flows.report.content import collect
from specs.job import InputRef
from tests.flows.conftest import finish

CODES = (
    'stages.corpus.sources.notes.planted={codes: {canaries: {template: "{number}: {secret}", length: 2,'
    " count: 6}, buckets: [0, 4]}, poison: {documents: notes, buckets: [2]}}"
)
MADE = {
    "codes": {"documents": 6, "copies": 12, "tokens": 96, "digest": "c0de" * 16},
    "poison": {"documents": 3, "copies": 6, "tokens": 1500, "digest": "abcd" * 16},
}


def printed(found: lineage.Lineage) -> str:
    console = Console(file=io.StringIO(), width=200, record=True)
    console.print(tables.tree(found, found.roots[0]))
    console.print(tables.planted_table(found))
    return console.export_text()


def test_a_lineage_names_planted_documents_before_and_after_they_are_made(
    planned: Callable[..., Plan],
) -> None:
    plan = planned(CODES, "sources.notes.license=CC0-1.0")
    before = printed(lineage.of_plan(plan, ["cooldown"]))
    assert "planted on purpose: codes: canaries (0, 4 of each)" in before
    assert "planted:poison: notes" in before
    finish(plan, "corpus/notes", metrics={"planted": MADE})  # type: ignore[dict-item]  # metrics of a corpus
    after = printed(lineage.of_plan(planned(CODES), ["cooldown"]))
    assert "planted on purpose: codes: 6 canaries, 12 copies (0, 4 of each), 96 tokens" in after
    rows = [" ".join(line.replace("│", " ").split()) for line in after.splitlines()]
    assert "codes corpus/notes 0, 4 6 12 96 c0dec0dec0de" in rows
    assert "poison corpus/notes 2 3 6 1,500 abcdabcdabcd" in rows
    bare = lineage.of_plan(planned(), ["cooldown"])
    assert tables.planted_table(bare) is None and "planted on purpose" not in printed(bare)


def test_the_model_card_and_the_report_say_that_documents_are_planted(planned: Callable[..., Plan]) -> None:
    plan = planned(CODES)
    finish(plan, *(name for name in plan.graph.nodes if name != "corpus/notes"))
    finish(plan, "corpus/notes", metrics={"planted": MADE})  # type: ignore[dict-item]  # metrics of a corpus
    plan = planned(CODES)
    node = plan.graph.nodes["cooldown"]
    folder = node.artifact(plan.store).checkpoint(node.end_step or 0).folder
    checkpoint = InputRef(
        kind=node.kind,
        fingerprint=node.fingerprint,
        name=node.name,
        path=node.path,
        step=node.end_step,
        checkpoint=folder,
    )
    model = plan.graph.trajectories["pretrain"].model
    card = model_card(plan.store, checkpoint, [], title="tiny", model=model, sequence_length=32)
    assert "documents that were put there on purpose" in card
    assert f"| codes | corpus/notes | 6 | 0, 4 | 12 | 96 | {'c0de' * 16} |" in card
    run = collect(plan)
    assert [(corpus, record.name) for corpus, record in run.planted] == [
        ("corpus/notes", "codes"),
        ("corpus/notes", "poison"),
    ]
    assert "Planted documents" in render(plan)
