"""The tables of `apertus rehearse`."""

from __future__ import annotations

import io

from rich.console import Console

from apertus_model.rehearsal.records import (
    KINDS,
    Collectives,
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
from flows.cli.tables.rehearsal import show_part

GB = 10**9
TENSORS = Tensors(
    operator="mm", shape=(4096, 512), dtype="bfloat16", kind="activations", number=3, bytes=2 * GB
)
REHEARSED = Rehearsed(
    attention="VarlenAttention",
    layers=["0"],
    micro_batches=4,
    memory=PeakMemory(
        total=21 * GB,
        kinds=dict(zip(KINDS, (GB * n for n in range(1, 7)), strict=True)),
        largest=[TENSORS],
        moments=[],
    ),
    collectives=[
        Collectives(
            kind="all-gather", mesh="fsdp", ranks=8, calls=1200, bytes=GB, asynchronous=0, seconds=0.5
        )
    ],
    flops={"matrix": 10**15, "attention": 0},
    synchronisations=[Synchronisation(place="apertus_model/trainer/trainer.py:264", what="item", calls=1)],
    operators=[Operators(kind="matrix", operator="mm", calls=9, flops=10**15, bytes=GB, seconds=1.5)],
    kinds={"matrix": 1.5, "attention": 0.0, "memory": 0.0},
    classes={},
    bound=0.8125,
    compute_seconds=1.5,
    waited_seconds=0.25,
    seconds=1.75,
)


def rank(number: int, report: RankReport, difference: float | None) -> RankResult:
    return RankResult(
        rank=number,
        pipeline_rank=0,
        planned_memory={"total": 22 * GB},
        memory_difference=difference,
        planned_flops=1e15,
        flops_ratio=None if difference is None else 1.0,
        report=report,
    )


def lines(*ranks: RankResult) -> list[str]:
    part = PartResult(
        stage="pretrain", part="pretrain/1", gpus=16, gpu="H100", ranks=list(ranks), bubble=0.125,
        step_seconds=2.0, tokens_per_second_per_gpu=8500.0,
    )  # fmt: skip
    output = io.StringIO()
    show_part(Console(file=output, width=160), part)
    return [" ".join(line.split()) for line in output.getvalue().splitlines()]


def test_the_table_compares_each_rank_with_the_plan() -> None:
    shown = lines(rank(0, RankReport(rank=0, rehearsed=REHEARSED), 22 / 21 - 1))
    assert "pretrain/1: memory of a GPU at the peak of a step, of 16 GPUs" in shown
    memory = "1 GB 2 GB 3 GB 4 GB 5 GB 6 GB 21 GB 22 GB +4.8%"
    assert any(memory in line for line in shown)
    assert "mm 4096 × 512 bfloat16 activations 3 2 GB" in shown
    assert "all-gather fsdp 8 1,200 0 1 GB 0.5 s" in shown  # nothing is hidden
    assert "apertus_model/trainer/trainer.py:264 item 1" in shown
    assert "81% of the operators' time is matrix products and attention:" in " ".join(shown)
    assert "a step of the part: 2 s with 12.5% of bubble, 8.5k tokens per second and GPU" in " ".join(shown)


def test_a_rank_that_does_not_build_is_one_line_with_its_place() -> None:
    failure = RankFailure(error="ValueError: 7 heads [of 2]", place="apertus_model/model/model.py:9")
    assert lines(rank(3, RankReport(rank=3, failure=failure), None)) == [
        "rank 3 of 16 of pretrain/1 does not build: ValueError: 7 heads [of 2]"
        " (apertus_model/model/model.py:9)"
    ]
