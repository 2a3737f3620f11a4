"""Compares published speeds of training with the predictions of a rehearsal.

    python -m tools.throughput              # writes its table into docs/estimates.md, between the marks
    python -m tools.throughput --formulas   # prints predictions by formulas, without older norms, in a second
    python -m tools.throughput Llama 8B     # prints the rows whose names have these words

Invariants: published numbers are here with their sources; predictions have one set of constants for each GPU
(`apertus_model.rehearsal.rates`), and none for a row. A row says so if its predicted speed is more than 15%
off, or its memory more than 10%.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from apertus_model.rehearsal.rates import Rates
from apertus_model.rehearsal.records import PartResult
from flows.execution.layout_search import busiest_ranks
from flows.execution.rehearsal import rehearse
from flows.planning.estimate.training import part_estimate
from flows.planning.graph import Node
from flows.planning.layouts import Layout
from specs.capabilities import CHUNK_TOKENS
from specs.launch import Launch, Parallel
from specs.model import ModelSpec
from specs.optimizer import OptimizerSpec
from specs.schedule import Schedule
from specs.settings import Precision, Recomputation
from specs.stages.training import Segment
from tools.published import SPEED, placed, plan_of

PAGE = Path(__file__).parents[1] / "docs" / "estimates.md"
MARK = "published speed"
GIB = 2**30
FLOAT8, FORMULAS = "float8", "--formulas"
UNKNOWN, BY_FORMULAS = "why is not known", "by formulas"
OFF = (8380, 61.8), (10_938, 47.96)  # published speed and memory of rows that are off
LLAMA = {"vocab_size": 128_256, "head_dim": 128, "n_kv_heads": 8, "activation": "swiglu"}
MODELS = {  # Llama 3.1; our layers also have a norm of queries and keys
    "8B": ModelSpec(dim=4096, n_layers=32, n_heads=32, ffn_dim=14_336, **LLAMA),  # type: ignore[arg-type]
    "70B": ModelSpec(dim=8192, n_layers=80, n_heads=64, ffn_dim=28_672, **LLAMA),  # type: ignore[arg-type]
    "405B": ModelSpec(dim=16_384, n_layers=126, n_heads=128, ffn_dim=53_248, **LLAMA),  # type: ignore[arg-type]
}
HEADINGS = ("run", "GPU", "GPUs", "tokens/s", "GiB", "predicted", "ratio", "GiB", "ratio")


@dataclass(frozen=True)
class Row:
    """A published run."""

    name: str
    gpu: str
    gpus: int
    speed: float  # tokens per second and GPU
    memory: float | None  # GiB, the most that the allocator held
    segment: Segment
    gpus_per_node: int = 8
    logit_bytes: int = 12  # of torchtitan's loss, per logit
    fused_norms: bool = True
    off: str = ""  # why the predicted speed or memory is off, or that no rehearsal predicted them

    @property
    def whole_logits(self) -> float:
        """The bytes that torchtitan's loss needs beyond ours: 12 N V, or 4 N V if it is compiled, less those
        of a chunk and of the weight's gradient (`apertus_model.losses.cross_entropy`)."""
        model, tp = self.segment.model, self.segment.parallel.tp
        tokens = (self.segment.micro_batch_size or 1) * self.segment.sequence_length
        chunk = 2 * CHUNK_TOKENS * model.vocab_size + 4 * model.vocab_size * model.dim
        return (self.logit_bytes * tokens * model.vocab_size - chunk) / tp


def llama(
    size: str,
    gpus: int,
    local: int,
    again: Recomputation,
    compiled: bool,
    linear: str = "param",
    **parallel: Any,
) -> Segment:
    """A segment of Llama 3.1 with sequences of 8,192 tokens. `local`: the number of sequences of a step on
    each data-parallel rank. A pipeline cuts them into as many micro-batches as it has processes (torchtitan,
    pull request 781)."""
    layout = Parallel.model_validate(parallel)
    return Segment(
        model=MODELS[size],
        sequence_length=8192,
        global_batch_size=local * gpus // (layout.tp * layout.pp),
        micro_batch_size=local // layout.pp,
        precision=Precision(linear=linear),  # type: ignore[arg-type]
        optimizer=OptimizerSpec(name="adamw", lr=3e-4).resolved({}),
        schedule=Schedule(),
        end_step=1,
        activation_checkpointing=again,
        compile=compiled,
        parallel=layout,
    )


def torchtitan() -> list[Row]:
    """The rows of torchtitan: benchmarks/llama3_h100_202412_torchtitan.md and
    llama3_8b_h200_2025-06_torchtitan.md."""
    rows = []

    def add(
        gpu: str, size: str, gpus: int, published: tuple[float, float], *settings: Any, **layout: Any
    ) -> None:
        segment = llama(size, gpus, *settings, **layout)
        parallel, narrow = segment.parallel, FLOAT8 in settings  # layers in float8 are compiled, too
        title = [f"Llama {size}", FLOAT8 if narrow else "compile" if segment.compile else ""]
        title += ["async" * parallel.async_tp, parallel.pp_schedule.partition("-")[0] * (parallel.pp > 1)]
        rows.append(
            Row(
                " ".join(filter(None, title)), gpu, gpus, *published, segment,
                # the loss is compiled from April 2025 on (pull requests 755 and 1033)
                logit_bytes=4 if gpu == "H200" else 12,
                off=UNKNOWN if published in OFF else "",
                # RMSNorm became a kernel in May 2025 (pytorch, pull request 153666); a compiler makes it one
                fused_norms=segment.compile,
            )
        )  # fmt: skip

    for gpus, plain, compiled, float8 in (
        (8, (5762, 82.4), (6667, 77.0), (8532, 76.8)),
        (128, (5605, 67.0), (6514, 62.0), (8380, 61.8)),
    ):
        add("H100-HBM2e", "8B", gpus, plain, 2, "selective", False)
        add("H100-HBM2e", "8B", gpus, compiled, 2, "selective", True)
        add("H100-HBM2e", "8B", gpus, float8, 2, "selective", True, FLOAT8)
    wide = {"tp": 8, "sequence_parallel": True}
    add("H100-HBM2e", "70B", 256, (829, 71.9), 16, "full", True, FLOAT8, **wide)
    wide |= {"async_tp": True}
    add("H100-HBM2e", "70B", 256, (876, 67.6), 16, "full", True, FLOAT8, **wide)
    for schedule, published in (("1f1b", (100, 82.5)), ("interleaved-1f1b", (128, 72.7))):
        layout = {"pp": 8, "pp_schedule": schedule, **wide}
        add("H100-HBM2e", "405B", 512, published, 32, "full", True, FLOAT8, **layout)
    add("H200", "8B", 32, (10_938, 47.96), 2, "selective", True, FLOAT8)
    return rows


def blackwell() -> list[Row]:
    """The rows of NVIDIA's Megatron Bridge in MXFP8: docs/performance-summary-archive.md, containers 26.04.01
    (70B) and 25.11 (8B), and its recipes in perf_recipes/llama. It recomputes nothing, replicates the weights
    that FSDP shards here, and overlaps the exchanges of tensor parallelism, which these rows wait for.
    Predicted by formulas: torchao has no casts for a rehearsal without such a GPU."""

    def row(name: str, gpu: str, node: int, gpus: int, speed: float, micro: int, segment: Segment) -> Row:
        segment = segment.model_copy(update={"micro_batch_size": micro})
        return Row(name, gpu, gpus, speed, None, segment, node, off=BY_FORMULAS)

    layout: dict[str, Any] = {"tp": 2, "sequence_parallel": True, "pp": 4}
    layout |= {"pp_schedule": "interleaved-1f1b", "virtual_stages": 5}
    small = llama("8B", 8, 16, "none", True, "mxfp8")
    large = llama("70B", 64, 32, "none", True, "mxfp8", **layout)
    return [
        row("Llama 8B mxfp8", "B200", 8, 8, 29_521, 2, small),
        row("Llama 8B mxfp8", "GB200", 72, 8, 29_789, 2, small),
        row("Llama 70B mxfp8 interleaved", "GB200", 72, 64, 3712, 1, large),
    ]


def apertus() -> list[Row]:
    """The rows of the Apertus report (arXiv 2509.14233): pretraining with the full batch, on Megatron."""
    parts = {size: plan_of(f"apertus-{size}").estimates.stages["pretrain"].parts[-1] for size in SPEED}
    return [
        Row(
            f"Apertus {size.upper()}", "GH200", part.gpus, SPEED[size], None, part.segment, 4,
            off=UNKNOWN,
        )
        for size, part in parts.items()
    ]  # fmt: skip


@dataclass(frozen=True)
class Predicted:
    """The prediction for a row."""

    speed: float  # tokens per second and GPU
    peak: float  # bytes


def by_formulas(row: Row) -> Predicted:
    """The prediction by formulas, in which RMSNorm is one kernel for every row."""
    layout = Layout(row.segment, row.gpus, Rates(row.gpu, row.gpus_per_node))
    return Predicted(layout.tokens_per_second_per_gpu, layout.memory)


def rehearsed(row: Row) -> PartResult:
    """The rehearsal of the busiest ranks of a row."""
    node = Node(
        name=row.name,
        stage="pretrain",
        kind="pretrain",
        version=1,
        part=row.segment,
        inputs={},
        launch=Launch(processes=row.gpus, parallel=row.segment.parallel),
        end_step=1,
        tokens=row.segment.tokens_per_step,
    )
    ranks = busiest_ranks(Layout(row.segment, row.gpus, Rates(row.gpu, row.gpus_per_node)))
    part = part_estimate(node, None, {})
    return rehearse(part, row.gpu, row.gpus_per_node, ranks, fused_norms=row.fused_norms)


def by_rehearsal(row: Row) -> Predicted:
    result = rehearsed(row)
    assert not result.failures, result.failures
    speed = result.tokens_per_second_per_gpu
    assert speed is not None
    peaks = [rank.report.rehearsed.memory.total for rank in result.ranks if rank.report.rehearsed is not None]
    return Predicted(speed, max(peaks))


def cells(row: Row, expected: Predicted) -> tuple[str, ...]:
    """The cells of a line: published and predicted numbers, and the ratio of predicted to published."""
    memory = "-" if row.memory is None else f"{row.memory:.1f}"
    known = row.name, row.gpu, f"{row.gpus:,}", f"{row.speed:,.0f}", memory
    predicted = f"{expected.speed:,.0f}", f"{expected.speed / row.speed:.2f}"
    peak = (expected.peak + (row.whole_logits if row.memory is not None else 0)) / GIB
    ratio = "-" if row.memory is None else f"{peak / row.memory:.2f}"
    return *known, *predicted, f"{peak:.1f}", ratio, *([row.off] if row.off else [])


def text(lines: list[tuple[str, ...]]) -> str:
    """The table as an indented block. Remarks about rows have no column."""
    rows = [HEADINGS, *lines]
    wide = [row if len(row) == len(HEADINGS) else row[:-1] for row in rows]
    widths = [max(map(len, column)) for column in zip_longest(*wide, fillvalue="")]
    return "".join(
        "    "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=False)).rstrip()
        + "\n"
        for row in rows
    )


def main(arguments: list[str]) -> None:
    """Prints the chosen rows; without arguments, prints all rows and writes them into the page."""
    predict = by_formulas if FORMULAS in arguments else by_rehearsal
    chosen = [word for word in arguments if word != FORMULAS]
    known = (*torchtitan(), *blackwell(), *apertus())
    rows = [row for row in known if all(word in row.name for word in chosen)]
    lines = []
    for row in rows:
        lines.append(cells(row, (by_formulas if row.off == BY_FORMULAS else predict)(row)))
        print(*lines[-1], sep="  ", flush=True)
    if not arguments:
        PAGE.write_text(placed(PAGE.read_text(), MARK, f"\n{text(lines)}\n"))


if __name__ == "__main__":
    main(sys.argv[1:])
