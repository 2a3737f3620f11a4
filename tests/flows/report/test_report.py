"""The report: the numbers it collects, and a page that stands alone whatever the store holds."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from flows.graph_layout import HEIGHT, WIDTH, draw
from flows.planning.plan import Plan, decide
from flows.report import render
from flows.report.content import collect
from flows.report.figures import Style
from flows.report.history import curve, position, running_mean, thin
from flows.report.result_charts import results
from flows.report.results import Evaluation, read_rewards, read_samples
from flows.report.wording import duration, elided, shown
from tests.flows.conftest import finish
from tests.flows.report.report_store import AnyPart, CountedPart, add, rows_of, store

Planned = Callable[..., Plan]
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&\"'"
TRAINED = ("pretrain/1", "pretrain/2", "pretrain/3")


class Page(HTMLParser):
    """What a browser makes of a page: its elements, its text, its data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.text += data

    @property
    def figures(self) -> dict[str, Any]:
        return json.loads(self.scripts[0])


def trained(plan: Plan) -> Plan:
    """Everything is finished; pretraining and cooldown have rows."""
    for name in (*TRAINED, "cooldown"):
        store(plan, name, rows=rows_of(plan, name), facts={"loss": 4.0, "tokens": 1, "epochs": {"corpus/notes": 0.5}, "passes": {}})
    finish(plan, *(name for name in plan.graph.nodes if name not in (*TRAINED, "cooldown")))
    plan.steps.update({name: decide(node, plan) for name, node in plan.graph.nodes.items()})
    return plan


# The axis of consumed tokens


def test_each_segment_continues_after_the_one_before(planned: Planned) -> None:
    plan = planned()
    trained(plan)
    found = curve(planned(), "pretrain")
    assert found is not None and found.begin == 0
    per_step = [128] * 12 + [256] * 4
    assert found.columns["loss"].x == [sum(per_step[: step + 1]) for step in range(16)]


def test_a_branch_begins_at_the_tokens_of_its_parents_checkpoint(planned: Planned) -> None:
    plan = planned("stages.cooldown.from=pretrain@step=10")
    store(plan, "cooldown", rows=[*rows_of(plan, "cooldown"), {"step": 6, "validation": {"corpus/notes": 3.5}}])
    found = curve(plan, "cooldown")
    assert found is not None and found.begin == 10 * 128
    assert found.columns["lr"].x == [1280 + 128 * step for step in range(1, 7)]
    assert (found.heldout["corpus/notes"].x, found.heldout["corpus/notes"].y) == ([1280 + 6 * 128], [3.5])


def test_steps_that_count_from_zero_and_merges_go_on_along_the_lineage(planned: Planned) -> None:
    plan = planned()
    add(plan, "long-context/1", "long_context", {"parent": ("pretrain/3", 16)}, steps=4, part=CountedPart(name="1"))
    add(plan, "long-context/2", "long_context", {"parent": ("long-context/1", 4)}, steps=4, part=CountedPart(name="2", tokens_per_step=100))
    add(
        plan,
        "merge",
        "merge",
        {"checkpoint:0": ("long-context/1", 2), "checkpoint:1": ("long-context/2", 3)},
        steps=0,
        part=AnyPart(name="m"),
    )
    add(plan, "sft", "sft", {"parent": ("merge", 0)}, steps=2, part=CountedPart(name="sft"))
    nodes = plan.graph.nodes
    assert position(plan.graph, nodes["long-context/1"], 4) == 2560 + 40
    assert position(plan.graph, nodes["merge"], 0) == 2560 + 40 + 300
    assert position(plan.graph, nodes["sft"], 2) == 2560 + 40 + 300 + 20


def test_an_unfinished_part_shows_its_rows_up_to_the_last_checkpoint(planned: Planned) -> None:
    plan = planned()
    store(plan, "pretrain/1", rows=rows_of(plan, "pretrain/1", until=5), until=5, facts={"loss": 4.0, "passes": {}})
    found, run = curve(plan, "pretrain"), collect(plan)
    assert found is not None and found.columns["loss"].x == [128 * step for step in range(1, 6)]
    part = next(part for part in run.parts if part.name == "pretrain/1")
    assert (part.state, part.done_steps, part.done_tokens, part.metrics) == ("partial", 5, 640, {"loss": 4.0})


def test_values_that_are_not_finite_are_left_out_and_counted(planned: Planned) -> None:
    plan = planned()
    rows = rows_of(plan, "pretrain/1")
    rows[3]["loss"] = float("nan")
    store(plan, "pretrain/1", rows=rows)
    run = collect(plan)
    assert len(run.curves[0].columns["loss"].x) == 7 and run.curves[0].broken == 1
    assert "pretrain: 1 recorded values are not finite and are left out of the curves" in run.notes


# Thinning


def test_thinning_keeps_the_ends_and_the_extremes_of_every_bucket() -> None:
    count = 100_000
    values = [2.0 + 0.001 * (index % 7) for index in range(count)]
    values[0], values[41_234], values[77_777], values[-1] = 3.0, 99.0, -5.0, 2.5
    found = thin(range(count), values, limit=2000)
    assert len(found.x) <= 2000 and found.x == sorted(found.x)
    assert {(0, 3.0), (41_234, 99.0), (77_777, -5.0), (count - 1, 2.5)} <= set(zip(found.x, found.y, strict=True))
    assert all(values[int(x)] == pytest.approx(y) for x, y in zip(found.x, found.y, strict=True))


def test_a_short_curve_is_not_thinned() -> None:
    assert thin([1, 2, 3], [5.0, 6.0, 4.0], limit=3).y == [5.0, 6.0, 4.0]


def test_the_running_mean_is_centred_and_narrows_at_the_ends() -> None:
    assert running_mean([1.0, 2.0, 6.0, 3.0], 1) == [1.5, 3.0, 11 / 3, 4.5]


# What is collected


def test_totals_states_and_mixtures(planned: Planned) -> None:
    run = collect(trained(planned()))
    assert {stage.name: stage.state for stage in run.stages} == dict.fromkeys(
        ["tokenizer", "corpus", "main", "second", "pretrain", "cooldown", "evaluate", "export"], "finished"
    )
    assert sum(part.done_tokens for part in run.parts) == sum(part.tokens for part in run.parts) == 2560 + 6 * 256
    share = run.mixtures["main"][0]
    assert (share.source, share.share, share.tokens, share.passes) == ("corpus/notes", 1.0, 40_000, 0.5)
    assert run.bytes == 4 * len(b"weights")
    export = next(stage for stage in run.stages if stage.name == "export")
    assert (export.reads, export.after) == (["cooldown", "tokenizer"], ["evaluate"])


def test_an_empty_store_makes_a_report_of_the_plan(planned: Planned) -> None:
    plan = planned()
    run, page = collect(plan), Page(render(plan))
    assert {stage.state for stage in run.stages} == {"not run"} and run.curves == [] and run.newest == ""
    assert "Nothing has been trained yet." in page.text and "Not run yet." in page.text
    assert list(page.figures) == ["chart-0"]  # the mixtures are known from the recipe


def test_a_gate_that_is_not_met_is_shown_as_failed(planned: Planned) -> None:
    plan = planned()
    finish(plan, metrics={"perplexity": 2000.0})
    run = collect(planned())
    assert next(stage for stage in run.stages if stage.name == "evaluate").state == "gate failed"
    gate = run.evaluations[0].gates[0]
    assert (gate.metric, gate.bound, gate.value, gate.failure is None) == ("perplexity", "≤ 1000", 2000.0, False)


def test_known_metrics_are_drawn_and_others_are_in_a_table(planned: Planned) -> None:
    plan = trained(planned())
    metrics = {"loss/position/0": 4.0, "loss/position/64": 3.0, "forgetting/corpus/notes": 0.1, "kl/against": 0.02, "quite/new": 7.25}
    rewards = {"reward/mean": 1.0, "reward/difference": 0.5, "reward/difference/low": 0.25, "reward/difference/high": 0.75}
    rows = [{"id": str(index), "reward": index / 10, "against": index / 20} for index in range(10)]
    add(plan, "compare", "evaluate", {"checkpoint": ("cooldown", 6)})
    store(plan, "compare", metrics=metrics | rewards, files={"rewards.json": {"model": "new", "against": "old", "rows": rows}})
    add(plan, "align", "dpo", {"parent": ("cooldown", 6)}, steps=3, part=CountedPart(name="align"))
    store(plan, "align", rows=rows_of(plan, "align", accuracy=0.7, reward_chosen=1.5))
    add(plan, "pairs", "pairs", {})
    store(plan, "pairs", metrics={"pairs": 12, "quantile_histogram": [3, 4, 5]})
    page = Page(render(plan))
    titles = {element[1].get("aria-label", "") or "" for element in page.elements if element[0] == "div"}
    for expected in ("Loss by position", "Forgetting", "Rewards: compare", "Difference of rewards", "Quantiles: pairs", "align"):
        assert any(title.startswith(expected) for title in titles), expected
    assert re.search(r"quite/new\s*–\s*7.25", page.text)
    own = next(
        figure for figure in page.figures.values() if any("loss (dpo)" in a["text"] for a in figure["layout"].get("annotations", []))
    )
    assert [a["text"] for a in own["layout"]["annotations"][-2:]] == ["<b>accuracy</b>", "<b>reward chosen</b>"]
    assert own["data"][0]["x"] == [2560 + 1536 + 10 * step for step in (1, 2, 3)]


def test_damaged_or_unexpected_files_become_notes(planned: Planned) -> None:
    assert read_samples(None) == [] and read_samples({"prompts": [3, {"completions": "no"}]})[0].completions == []
    assert read_rewards([]) is None and read_rewards({"rows": [{"reward": "high"}, {"reward": float("nan")}]}) is None
    plan = trained(planned())
    add(plan, "compare", "evaluate", {"checkpoint": ("cooldown", 6)})
    store(plan, "compare", metrics={"kl/against": 1.0}, files={"samples.json": {"prompts": []}, "rewards.json": {}})
    node = plan.graph.nodes["compare"]
    Path(plan.store.full(f"{node.path}/attempts/attempt-compare/samples.json")).write_text("{")
    run = collect(plan)
    assert run.prompts == [] and any("samples.json of compare could not be read" in note for note in run.notes)
    assert "kl/against" in render(plan)


def test_completions_of_several_evaluations_stand_side_by_side(planned: Planned) -> None:
    plan = trained(planned())
    for name, model in (("before", "base"), ("later", "tuned")):
        add(plan, name, "evaluate", {"checkpoint": ("cooldown", 6)})
        sampled = {"id": "p1", "prompt": "Say hello", "completions": [{"model": model, "text": f"hello from {model}", "reward": 0.5}]}
        store(plan, name, metrics={"reward/mean": 0.5}, files={"samples.json": {"prompts": [sampled]}})
    (prompt,) = collect(plan).prompts
    assert [(completion.model, completion.reward) for completion in prompt.completions] == [("base", 0.5), ("tuned", 0.5)]


# The page


def test_hostile_text_stays_text(planned: Planned) -> None:
    plan = trained(planned("stages.main.description=" + json.dumps(HOSTILE)))
    stage = "evil" + HOSTILE.replace("/", "\u2215")
    add(plan, stage, "evaluate", {"checkpoint": ("cooldown", 6)})
    completions = [{"model": HOSTILE, "text": HOSTILE, "reward": 1}]
    store(
        plan,
        stage,
        metrics={f"perplexity/{HOSTILE}": 3.0, "reward/mean": 1.0, HOSTILE: 1.0},
        files={
            "samples.json": {"prompts": [{"id": HOSTILE, "prompt": HOSTILE, "completions": completions}]},
            "rewards.json": {"model": HOSTILE, "against": HOSTILE, "rows": [{"id": HOSTILE, "reward": 1, "against": 0}]},
        },
    )
    text = render(plan)
    page = Page(text)
    assert not [element for element in page.elements if element[0] == "img" or any(name.startswith("on") for name in element[1])]
    assert [element[1].get("type") for element in page.elements if element[0] == "script"] == ["application/json", None, None]
    assert page.text.count(HOSTILE) >= 4
    labels = [str(trace.get("name")) + str(trace.get("x")) for figure in page.figures.values() for trace in figure["data"]]
    assert any("&lt;img" in text for text in labels) and not any("<" in text for text in labels)
    templates = {trace.get("hovertemplate") for figure in page.figures.values() for trace in figure["data"]}
    assert not any(template and "img" in template for template in templates)


def test_page_is_self_contained(planned: Planned) -> None:
    text = render(trained(planned()))
    page = Page(text)
    assert len(text.encode()) < 8_000_000
    for _, attributes in page.elements:
        for name in ("src", "href", "srcset", "action", "data", "poster"):
            assert name not in attributes or str(attributes[name]).startswith("#")
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style and "@import" not in style
    policy = next(
        attributes["content"] or "" for tag, attributes in page.elements if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none'; img-src data: blob:;") and "http" not in policy
    assert "script-src 'sha256-" in policy and policy.count("'sha256-") == 2
    anchors = {attributes["id"] for _, attributes in page.elements if "id" in attributes}
    assert {f"#{anchor}" for anchor in anchors} >= {attributes["href"] for tag, attributes in page.elements if tag == "a"}


def test_the_same_store_gives_the_same_page(planned: Planned) -> None:
    plan = trained(planned())
    assert render(plan) == render(planned())


def test_the_command_writes_the_file_and_loads_neither_torch_nor_prefect(recipe: Path, planned: Planned, tmp_path: Path) -> None:
    plan = trained(planned())
    before = sorted(str(path) for path in Path(plan.store.root).rglob("*"))
    program = (
        "import sys; from flows.cli.__main__ import app; "
        f"app(['report', {str(recipe)!r}, '--store', {plan.store.url!r}], standalone_mode=False); "
        "sys.exit(sum(name in sys.modules for name in ('torch', 'prefect')))"
    )
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env={"PYTHONPATH": str(root), "PATH": ""}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "tiny-report.html" in done.stdout and (tmp_path / "tiny-report.html").read_text().startswith("<!doctype html>")
    assert sorted(str(path) for path in Path(plan.store.root).rglob("*")) == before


# The stage graph


def test_layers_follow_what_is_read_and_implied_arrows_are_left_out() -> None:
    reads = {
        "tokenizer": [],
        "corpus": ["tokenizer"],
        "train": ["corpus", "tokenizer"],
        "measure": ["train", "corpus"],
        "export": ["train"],
    }
    drawing = draw(reads, {"export": ["measure"]})
    y = {box.stage: box.y for box in drawing.boxes}
    assert y["tokenizer"] < y["corpus"] < y["train"] < y["measure"] < y["export"]
    drawn = {(arrow.begin, arrow.end, arrow.waits) for arrow in drawing.arrows}
    assert drawn == {
        ("tokenizer", "corpus", False),
        ("corpus", "train", False),
        ("train", "measure", False),
        ("train", "export", False),
        ("measure", "export", True),
    }


def test_boxes_do_not_overlap_and_lie_inside_the_drawing() -> None:
    reads: dict[str, list[str]] = {"root": []}
    reads |= {f"mixture-{index}": ["root"] for index in range(5)}
    for index in range(9):
        reads[f"train-{index}"] = [f"train-{index - 1}" if index else "mixture-0", f"mixture-{index % 5}"]
    reads |= {f"measure-{index}": [f"train-{index}"] for index in range(9)}
    drawing = draw(reads, {})
    assert drawing.height > drawing.width  # a deep graph runs from top to bottom
    for one in drawing.boxes:
        assert one.x >= 0 and one.x + WIDTH <= drawing.width and one.y >= 0 and one.y + HEIGHT <= drawing.height
        for other in drawing.boxes:
            assert one is other or abs(one.x - other.x) >= WIDTH or abs(one.y - other.y) >= HEIGHT
    assert draw(reads, {}) == drawing


@pytest.mark.parametrize("layers", range(1, 14))
def test_long_chain_is_split_across_pages_between_boxes(layers: int) -> None:
    drawing = draw({f"stage-{index}": [f"stage-{index - 1}"] if index else [] for index in range(layers)}, {})
    assert drawing.width <= 680 / 0.75  # the width of paper, at three quarters of the size
    assert len(drawing.cuts) == (layers - 1 if layers > 4 else 0)
    assert all(cut <= box.y or cut >= box.y + HEIGHT for cut in drawing.cuts for box in drawing.boxes)


def test_variants_in_few_layers_are_drawn_from_left_to_right() -> None:
    reads: dict[str, list[str]] = {"root": [], "data": ["root"]}
    for index in range(6):
        reads |= {f"train-{index}": ["data"], f"measure-{index}": [f"train-{index}"], f"export-{index}": [f"measure-{index}"]}
    assert draw(reads, {}).cuts == []


def test_long_name_keeps_its_end() -> None:
    assert elided("evaluate-aligned-qrpo", 20) == "evaluate-…igned-qrpo"
    assert elided("evaluate-aligned-dpo", 20) == "evaluate-aligned-dpo"


def test_bars_are_labelled_in_plain_numbers() -> None:
    values = {"evaluate": {"perplexity": 1.0, "perplexity/code": 55.19, "perplexity/long": 999.6, "perplexity/talk": 25_120.4}}
    found = [Evaluation(name, name, name, name, metrics, [], None) for name, metrics in values.items()]
    drawn = results(found, {"evaluate": Style("#000")})[0].plot["data"][0]
    assert list(drawn["text"]) == ["55.2", "1,000", "25,120", "1"]


@pytest.mark.parametrize(("seconds", "text"), [(45.21, "45.2 s"), (200, "3 min 20 s"), (18_720, "5 h 12 min"), (273_600, "3 d 4 h")])
def test_durations_are_in_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_shown_values_are_short() -> None:
    assert [shown(value) for value in (True, None, 12_345, 0.123456, {"length": 3}, [1, 2], {})] == [
        "yes", "–", "12,345", "0.12346", "length 3", "1, 2", "–",
    ]  # fmt: skip
