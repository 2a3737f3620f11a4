"""The numbers that a report collects."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from flows.planning.plan import Plan, decide, make
from flows.report import render
from flows.report.content import collect
from flows.report.history import curve
from infra.store import Store
from specs.anomalies import Event
from specs.recipe import load
from tests.flows.conftest import finish
from tests.flows.report.page import Page
from tests.flows.report.report_store import add, rows_of, store, trained
from tools.published import RECIPES, plan_of

Planned = Callable[..., Plan]


def test_an_unfinished_part_shows_its_rows_up_to_the_last_checkpoint(planned: Planned) -> None:
    plan = planned()
    store(
        plan,
        "pretrain/1",
        rows=rows_of(plan, "pretrain/1", until=5),
        until=5,
        facts={"loss": 4.0, "passes": {}},
    )
    found, run = curve(plan, "pretrain"), collect(plan)
    assert found is not None and found.columns["loss"].x == [128 * step for step in range(1, 6)]
    part = next(part for part in run.parts if part.name == "pretrain/1")
    assert (part.state, part.done_steps, part.done_tokens, part.metrics) == (
        *("interrupted", 5, 640),
        {"loss": 4.0},
    )


def test_values_that_are_not_finite_are_left_out_and_counted(planned: Planned) -> None:
    plan = planned()
    rows = rows_of(plan, "pretrain/1")
    rows[3]["loss"] = float("nan")
    store(plan, "pretrain/1", rows=rows)
    run = collect(plan)
    assert len(run.curves[0].columns["loss"].x) == 7 and run.curves[0].broken == 1
    assert "pretrain: 1 recorded value is not finite and left out of the curves" in run.notes


def test_anomalies_of_finished_and_unfinished_parts_are_notes(planned: Planned) -> None:
    plan = planned()
    event = asdict(Event(4, "loss", 9.0, 1.0, 5.0, "report"))
    store(plan, "pretrain/1", until=5, facts={"passes": {}, "anomalies": {"events": [event], "loss": [4.0]}})
    finish(plan, "cooldown", facts={"anomalies": [event]})
    plan.steps["cooldown"] = decide(plan.graph.nodes["cooldown"], plan)
    told = "1 anomaly: step 4: the loss of 9 spikes above 5; training continues"
    notes = collect(plan).notes
    assert [note for note in notes if "anomaly" in note] == [f"pretrain/1: {told}", f"cooldown: {told}"]


def test_totals_states_and_mixtures(planned: Planned) -> None:
    run = collect(trained(planned()))
    assert {stage.name: stage.state for stage in run.stages} == dict.fromkeys(
        ["tokenizer", "corpus", "main", "second", "pretrain", "cooldown", "evaluate", "export"], "finished"
    )
    assert (
        sum(part.done_tokens for part in run.parts)
        == sum(part.tokens for part in run.parts)
        == 2560 + 6 * 256
    )
    share = run.mixtures["main"][0]
    assert (share.source, share.share, share.tokens, share.passes) == ("corpus/notes", 1.0, 40_000, 0.5)
    assert run.bytes == 4 * len(b"weights")
    export = next(stage for stage in run.stages if stage.name == "export")
    assert (export.reads, export.after) == (["cooldown", "tokenizer"], ["evaluate"])


def test_passes_through_a_mixture_add_up_over_lengths_and_not_over_the_segments_of_one(
    planned: Planned,
) -> None:
    run = collect(trained(planned("stages.cooldown.mixture=main", "stages.cooldown.sequence_length=64")))
    lengths = {
        part.settings["part"]["sequence_length"]
        for part in run.parts
        if "mixture" in part.inputs and part.inputs["mixture"].name == "main"
    }
    assert len(lengths) == 2
    assert run.mixtures["main"][0].passes == 0.5 + 0.5  # the facts of every checkpoint
    assert run.mixtures["second"][0].passes == 0.5


def test_a_gate_that_is_not_met_is_shown_as_failed(planned: Planned) -> None:
    plan = planned()
    finish(plan, metrics={"perplexity": 2000.0})
    run = collect(planned())
    assert next(stage for stage in run.stages if stage.name == "evaluate").state == "gate failed"
    gate = run.evaluations[0].gates[0]
    assert (gate.metric, gate.bound, gate.value, gate.failure is None) == (
        "perplexity",
        "≤ 1000",
        2000.0,
        False,
    )


def test_published_scores_stand_beside_ours_with_the_difference(planned: Planned) -> None:
    stated = "{perplexity: {value: 9.5, unit: metric, source: a report}}"
    plan = planned(f"stages.evaluate.reference={stated}")
    finish(plan, metrics={"perplexity": 10.0, "perplexity_stderr": 0.25})
    (score,) = collect(planned(f"stages.evaluate.reference={stated}")).evaluations[0].published
    assert (score.ours, score.published, score.difference, score.stderr, score.stderr_of) == (
        10.0,
        9.5,
        0.5,
        0.25,
        "ours alone",
    )
    page = Page(render(planned(f"stages.evaluate.reference={stated}")))
    assert re.search(r"evaluate\s*perplexity\s*10\s*9\.5\s*\+0\.5\s*0\.25\s*ours alone\s*a report", page.text)


def test_completions_of_several_evaluations_stand_side_by_side(planned: Planned) -> None:
    plan = trained(planned())
    for name, model in (("before", "base"), ("later", "tuned")):
        add(plan, name, "evaluate", {"checkpoint": ("cooldown", 6)})
        sampled = {
            "id": "p1",
            "prompt": "Say hello",
            "completions": [{"model": model, "text": f"hello from {model}", "reward": 0.5}],
        }
        store(plan, name, metrics={"reward/mean": 0.5}, files={"samples.json": {"prompts": [sampled]}})
    (prompt,) = collect(plan).prompts
    assert [(completion.model, completion.reward) for completion in prompt.completions] == [
        ("base", 0.5),
        ("tuned", 0.5),
    ]


def test_a_box_of_many_variants_counts_the_variants_that_are_finished(tmp_path: Path) -> None:
    """Each has several parts, of which one variant has all."""
    plan = make(load(RECIPES / "goldfish-mini.yaml"), Store.open(str(tmp_path)))
    variant = next(node.stage for node in plan.graph.nodes.values() if node.stage.startswith("evaluate-"))
    for node in plan.graph.nodes.values():
        if node.stage == variant:
            store(plan, node.name)
    (box,) = (box for box in collect(plan).boxes if box.name == "evaluate")
    assert (box.finished, len(box.variants)) == (1, 9)
    assert len(box.parts) > 9


def test_variants_are_joined_after_everything_that_any_of_them_reads() -> None:
    """The mixture of a later variant comes after the first variant in the plan."""
    boxes = collect(plan_of("continue-pretrain-mini")).boxes
    assert {"continue", "evaluate", "replay-10"} <= {box.name for box in boxes}
    for index, box in enumerate(boxes):
        assert {*box.reads, *box.after} <= {other.name for other in boxes[:index]}
