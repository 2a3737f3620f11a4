"""The charts and tables of rehearsed ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from apertus_model.rehearsal.records import (
    KINDS,
    Collectives,
    Moment,
    Operators,
    PartResult,
    PeakMemory,
    RankFailure,
    RankReport,
    RankResult,
    Rehearsed,
    Synchronisation,
    Tensors,
)
from flows.planning.plan import Plan
from flows.rehearsal_tables import tables
from flows.report import render
from flows.report.rehearsal import by_stage, rehearsals
from tests.flows.report.page import Page

GB = 10**9


def rehearsed(peak: int, *, waited: float = 2.0) -> Rehearsed:
    moments = [
        Moment(seconds=0.0, kinds=(2 * GB, 0, 4 * GB, 0, 0, 0)),
        Moment(seconds=3.0, kinds=(2 * GB, 0, 4 * GB, peak - 6 * GB, 0, 0)),
    ]
    exchanged = [
        Collectives(kind="all-gather", mesh=mesh, ranks=2, calls=1, bytes=1, asynchronous=0, seconds=seconds)
        for mesh, seconds in (("tp", 0.5), ("tp", 0.25), ("fsdp", 5.0))
    ]
    return Rehearsed(
        attention="", layers=[], micro_batches=1,
        memory=PeakMemory(total=peak, kinds=dict.fromkeys(KINDS, 0), largest=[], moments=moments),
        collectives=exchanged, flops={}, synchronisations=[], operators=[],
        kinds={"matrix": 3.0, "attention": 0.0, "memory": 1.0}, classes={}, bound=0.75,
        compute_seconds=4.0, waited_seconds=waited,
        seconds=4.0 + waited,
    )  # fmt: skip


def rank(number: int, report: RankReport, planned: int = 0) -> RankResult:
    builds = report.rehearsed
    return RankResult(
        rank=number, pipeline_rank=0, planned_memory={"total": planned},
        memory_difference=planned / builds.memory.total - 1 if builds else None,
        planned_flops=1.0, flops_ratio=1.0 if builds else None, report=report,
    )  # fmt: skip


def part(
    name: str = "pretrain/1",
    stage: str = "pretrain",
    ranks: dict[int, Rehearsed] | None = None,
    failure: RankFailure | None = None,
    bubble: float = 0.5,
) -> PartResult:
    built = {0: rehearsed(60 * GB), 512: rehearsed(70 * GB, waited=0.75)} if ranks is None else ranks
    planned = {0: 63 * GB, 512: 70 * GB}
    results = [
        rank(number, RankReport(rank=number, rehearsed=found), planned[number])
        for number, found in built.items()
    ]
    if failure is not None:
        results.append(rank(3, RankReport(rank=3, failure=failure)))
    return PartResult(
        stage=stage, part=name, gpus=4096, gpu="GH200", bubble=bubble, step_seconds=None,
        tokens_per_second_per_gpu=812.0, ranks=results,
    )  # fmt: skip


def test_memory_is_stacked_by_kind_for_the_rank_with_the_largest_peak() -> None:
    memory, _ = rehearsals([part()])["pretrain/1"]
    assert memory.title == "Memory of a step: pretrain/1, rank 512 of 4,096"
    assert memory.summary == "Peak 70.0 GB; dashed: the 96 GB of the GH200."
    drawn = {trace["name"]: list(trace["y"]) for trace in memory.plot["data"] if trace.get("stackgroup")}
    assert drawn == {"weights": [2, 2], "optimizer states": [4, 4], "activations": [0, 64]}
    assert [entry.text for entry in memory.legend] == list(drawn)
    (limit,) = [trace for trace in memory.plot["data"] if not trace.get("stackgroup")]
    assert list(limit["y"]) == [96, 96]


def test_a_small_model_is_drawn_in_its_own_units_without_the_limit_of_the_gpu() -> None:
    large = rehearsed(70 * GB)
    moments = [
        Moment(seconds=moment.seconds / 1e3, kinds=tuple(kind // 1000 for kind in moment.kinds))
        for moment in large.memory.moments
    ]
    small = large.model_copy(
        update={
            "memory": large.memory.model_copy(update={"total": 70_000_000, "moments": moments}),
            "collectives": [],
            "kinds": {"matrix": 3e-6},
            "waited_seconds": 0.0,
            "seconds": 3e-6,
        }
    )
    memory, time = rehearsals([part(bubble=0.0, ranks={0: small})])["pretrain/1"]
    assert memory.summary == "Peak 70.0 MB; 0.073% of the 96 GB of the GH200."
    assert max(max(trace["y"]) for trace in memory.plot["data"]) == 64
    assert memory.plot["layout"]["xaxis"]["title"]["text"] == "milliseconds of computation"
    assert time.plot["layout"]["xaxis"]["title"]["text"] == "microseconds"
    assert [list(trace["x"]) for trace in time.plot["data"]] == [[pytest.approx(3)]]


def test_the_bars_of_a_rank_are_the_time_of_its_step() -> None:
    _, time = rehearsals([part()])["pretrain/1"]
    bars = {trace["name"]: list(trace["x"]) for trace in time.plot["data"]}
    assert bars == {
        "matrix products": [3, 3],
        "memory-bound operators": [1, 1],
        "tensor parallelism": [0.75, 0.75],
        "FSDP, beyond computation": [1.25, 0],
        "idle in the pipeline": [3, 2.375],
    }
    assert [sum(column) for column in zip(*bars.values(), strict=True)] == [6 * 1.5, 4.75 * 1.5]
    assert time.summary == "812 tokens per second and GPU."


def test_the_report_has_a_page_for_each_stage_that_was_rehearsed(planned: Callable[..., Plan]) -> None:
    hostile = "</script><img src=x onerror=alert(2)>"
    refused = part("sft", "sft", {}, RankFailure(error="7 heads for tp 2", place="model.py:9"))
    page = Page(render(planned(), [part(), part(hostile), refused]))
    assert "A step of single ranks" in page.text and hostile in page.text
    assert not [element for element in page.elements if element[0] == "img"]
    assert len(page.figures) == 1 + 4
    pages = [facts["id"] for name, facts in page.elements if facts.get("class") == "page"]
    assert pages == ["rehearsal-1", "rehearsal-2"]
    links = [facts["href"] for name, facts in page.elements if name == "a" and "href" in facts]
    assert {f"#{name}" for name in pages} <= {*links}
    assert "sft, rank 3: 7 heads for tp 2" in page.text
    for text in ("memory of a GPU at the peak", "+5.0%", "collectives of a step of rank 512", "; async: "):
        assert text in page.text
    assert "A step of single ranks" not in Page(render(planned())).text


@pytest.mark.parametrize("parts", [[], [part(ranks={})]])
def test_what_does_not_build_has_no_charts(parts: list[PartResult]) -> None:
    assert rehearsals(parts) == {}


def test_memory_is_beside_the_plan_and_the_rest_is_of_the_rank_with_the_largest_peak() -> None:
    found = rehearsed(70 * GB)
    kept = Tensors(operator="mm", shape=(8, 4096), dtype="bfloat16", kind="activations", number=3, bytes=GB)
    found = found.model_copy(
        update={
            "memory": found.memory.model_copy(update={"largest": [kept]}),
            "synchronisations": [Synchronisation(place="a.py:7", what="tolist", calls=1)],
            "operators": [
                Operators(kind="memory", operator="add", calls=2, flops=0, bytes=2 * GB, seconds=1.0)
            ],
        }
    )
    memory, tensors, collectives, waits, operators = tables(part(ranks={0: rehearsed(60 * GB), 512: found}))
    assert [(row[0], *row[8:]) for row in memory.rows] == [
        ("0", "60 GB", "63 GB", "+5.0%", "-", "1.000"),
        ("512", "70 GB", "70 GB", "+0.0%", "-", "1.000"),
    ]
    assert tensors.rows == [("mm", "8 × 4096", "bfloat16", "activations", "3", "1 GB")]
    assert collectives.title == "collectives of a step of rank 512"
    assert collectives.rows[0] == ("all-gather", "tp", "2", "1", "0", "1 B", "0.5 s", "-")
    assert waits.rows == [("a.py:7", "tolist", "1")]
    assert operators.rows[0] == ("add", "memory", "2", "-", "2 GB", "1 s", "25.0%")
    assert "75% of the operators' time" in operators.caption
    every = (memory, tensors, collectives, waits, operators)
    assert all(len(row) == len(table.headings) for table in every for row in table.rows)


def test_stages_are_in_the_order_of_the_recipe_and_one_that_does_not_build_has_no_tables() -> None:
    parts = [part("b/1", "b"), part("a", "a"), part("b/2", "b")]
    assert {stage: [one.part for one in found] for stage, found in by_stage(parts).items()} == {
        "b": ["b/1", "b/2"],
        "a": ["a"],
    }
    assert list(by_stage(parts)) == ["b", "a"]
    assert tables(part(ranks={})) == []
