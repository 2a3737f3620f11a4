"""`apertus rehearse --search`: what is rehearsed, what is dropped, and what is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from apertus_model.rehearsal.records import (
    KINDS,
    PartResult,
    PeakMemory,
    RankFailure,
    RankReport,
    RankResult,
    Rehearsed,
)
from flows.cli.__main__ import app
from flows.execution.layout_search import Search, busiest_ranks, described, search, spearman
from flows.planning.estimate.training import PartEstimate
from flows.planning.layouts import Layout
from specs.errors import StageError
from tests.flows.planning.test_layouts import RATES, RECIPES, part_of

PATH = ("stages", "pretrain")


class Runs:
    """Rehearsals whose peak and speed are functions of the layout."""

    def __init__(self, peak: Any, speed: Any = lambda parallel: 1000.0) -> None:
        self.peak, self.speed = peak, speed
        self.ranks: list[list[int]] = []

    def __call__(self, part: PartEstimate, gpu: str, gpus_per_node: int, ranks: list[int]) -> PartResult:
        self.ranks.append(ranks)
        peak = self.peak(part.segment.parallel)
        kinds = dict.fromkeys(KINDS, 0)
        rehearsed = Rehearsed(
            attention="", layers=[], micro_batches=1,
            memory=PeakMemory(total=peak, kinds=kinds, largest=[], moments=[]), collectives=[], flops={},
            synchronisations=[], operators=[], kinds={}, classes={}, bound=1.0, compute_seconds=1.0,
            waited_seconds=0.0, seconds=1.0,
        )  # fmt: skip
        failure = RankFailure(error="ValueError: no such layout", place="") if peak < 0 else None
        report = RankReport(rank=0, rehearsed=None if failure else rehearsed, failure=failure)
        rank = RankResult(
            rank=0, pipeline_rank=0, planned_memory={}, memory_difference=None, planned_flops=1.0,
            flops_ratio=None, report=report,
        )  # fmt: skip
        return PartResult(
            stage="pretrain", part=part.node.name, gpus=part.gpus, gpu=gpu, ranks=[rank], bubble=0.0,
            step_seconds=None if failure else 1.0,
            tokens_per_second_per_gpu=None if failure else self.speed(part.segment.parallel),
        )  # fmt: skip


@pytest.fixture
def part() -> PartEstimate:
    return part_of(RECIPES / "apertus-8b.yaml", "pretrain")


def searched(part: PartEstimate, runs: Runs, refuses: Any = lambda layout: False, nodes: int = 16) -> Search:
    def accept(layout: Layout) -> PartEstimate | str:
        if refuses(layout):
            return "refused"
        launch = part.node.launch.model_copy(update={"processes": layout.processes})
        return replace(part, node=replace(part.node, part=layout.segment, launch=launch))

    return search("apertus-8b", part, PATH, "GH200", 4, nodes, accept, number=3, run=runs)


def test_the_kinds_that_fit_are_found_and_sorted_by_their_rehearsed_speed(part: PartEstimate) -> None:
    found = searched(part, Runs(lambda parallel: 50 * 10**9, lambda parallel: 1000.0 * parallel.tp))
    kinds = [
        tuple(one.launch["parallel"][name] for name in ("tp", "sequence_parallel", "cp", "pp", "pp_schedule"))
        for one in found.best
    ]
    assert len(set(kinds)) == 3
    speeds = [one.tokens_per_second_per_gpu for one in found.best]
    assert speeds == sorted(speeds, reverse=True)
    assert found.gpus == 64 and found.own_gpus == 1024
    assert found.own.launch["processes"] == 1024
    assert found.dropped == []


def test_what_does_not_fit_or_build_is_dropped_and_what_the_recipe_refuses_is_not_rehearsed(
    part: PartEstimate,
) -> None:
    runs = Runs(lambda parallel: -1 if parallel.tp == 1 else (97 if parallel.cp > 1 else 50) * 10**9)
    found = searched(part, runs, refuses=lambda layout: layout.parallel.tp == 4)
    assert {one.launch["parallel"]["tp"] for one in found.best} == {2}
    assert {one.launch["parallel"]["cp"] for one in found.best} == {1}
    reasons = {one.launch["parallel"]["tp"]: one.dropped for one in found.dropped}
    assert reasons[1] == "ValueError: no such layout"
    assert reasons.get(2, "its peak is more than the GPU has") == "its peak is more than the GPU has"
    assert 4 not in reasons
    assert found.agreement is None  # all are as fast


def test_speeds_within_a_percent_are_as_fast_when_orders_are_compared(part: PartEstimate) -> None:
    runs = Runs(lambda parallel: 50 * 10**9, lambda parallel: 1000.0 + parallel.cp + parallel.tp)
    assert searched(part, runs).agreement is None


@pytest.mark.slow
def test_without_a_layout_one_message_says_why(part: PartEstimate) -> None:
    runs = Runs(lambda parallel: 0)
    with pytest.raises(
        StageError, match=r"no layout of pretrain/4 on 148 GPUs: its batch of 2,048 sequences"
    ):
        searched(part, runs, nodes=37)
    with pytest.raises(
        StageError, match=r"on 1 GPUs fits: the smallest needs .* has 40 GB. Fix: raise --nodes"
    ):
        search("apertus-8b", part, PATH, "A100-40GB", 1, 1, lambda layout: "no", run=runs)
    assert runs.ranks == []
    with pytest.raises(StageError, match="the recipe accepts no layout"):
        searched(part, runs, refuses=lambda layout: True)
    with pytest.raises(StageError, match=r"can run; of the fastest: ValueError: no such layout"):
        searched(part, Runs(lambda parallel: -1))


def test_the_ranks_with_most_memory_and_most_time_are_rehearsed() -> None:
    """70B, interleaved: the second stage of the pipeline waits for most, the last has the output too."""
    part = part_of(RECIPES / "apertus-70b.yaml", "pretrain")
    assert busiest_ranks(Layout(part.segment, part.gpus, RATES)) == [512]


@pytest.mark.parametrize(
    ("first", "second", "coefficient"),
    [
        ([1, 2, 3, 4], [10, 20, 30, 40], 1.0),
        ([1, 2, 3, 4], [4, 3, 2, 1], -1.0),
        ([1, 2, 3, 4], [2, 1, 4, 3], 0.6),
        ([1, 1, 2], [5, 5, 9], 1.0),
        ([1, 2], [1, 2], None),
        ([1, 1, 1], [1, 2, 3], None),
    ],
)
def test_spearman(first: list[float], second: list[float], coefficient: float | None) -> None:
    assert spearman(first, second) == (None if coefficient is None else pytest.approx(coefficient))


def test_a_layout_is_described_by_its_degrees_of_parallelism() -> None:
    launch = {"parallel": {"dp_replicate": 1, "dp_shard": 8, "tp": 2, "sequence_parallel": True, "cp": 1,
                           "pp": 4, "pp_schedule": "interleaved-1f1b", "virtual_stages": 5}}  # fmt: skip
    settings = {"micro_batch_size": 2, "activation_checkpointing": "selective"}
    assert described(launch, settings) == (
        "dp_shard 8, tp 2, pp 4, sequence parallel, interleaved-1f1b of 5, micro-batch 2,"
        " recomputation selective"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--search"], "Fix: name a STAGE"),
        (["pretrain", "--search", "--rank", "1"], "leave out --rank"),
        (["pretrain", "--nodes", "4"], "--nodes needs --search. Fix: add --search"),
        (["pretrain", "--search", "--report", "page.html"], "--report draws ranks"),
        (["corpus", "--search"], "no stage 'corpus' trains in this recipe"),
        (["pretrain", "--search", "--nodes", "37"], "there is no layout of pretrain/1 on 148 GPUs"),
        (["pretrain", "--search", "--gpu", "H1000"], "no data sheet of a GPU 'H1000'"),
    ],
)
def test_a_mistake_ends_with_its_message_and_code_2(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    recipe = str(RECIPES / "apertus-8b.yaml")
    result = CliRunner().invoke(app, ["rehearse", recipe, *arguments, "--store", str(tmp_path)])
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
