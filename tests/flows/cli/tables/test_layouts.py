"""The tables of `apertus rehearse --search`."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from flows.cli.tables.rehearsal import show_search
from flows.execution.layout_search import Found, Search

GB = 10**9


def found(tp: int, speed: float | None, peak: int | None, dropped: str = "") -> Found:
    parallel: dict[str, Any] = {
        "dp_replicate": 1, "dp_shard": 64 // tp, "tp": tp, "cp": 1, "pp": 1, "pp_schedule": "1f1b",
        "sequence_parallel": True,
    }  # fmt: skip
    return Found(
        launch={"processes": 64, "parallel": parallel},
        settings={"micro_batch_size": 2, "activation_checkpointing": "none"},
        yaml=f"stages:\n  pretrain:\n    launch: {{tp: {tp}}}\n",
        expected=5000.0,
        planned_memory=44 * GB,
        tokens_per_second_per_gpu=speed,
        memory=peak,
        dropped=dropped,
    )


def test_layouts_stand_beside_the_recipes_own_and_can_be_pasted() -> None:
    search = Search(
        pipeline="p", stage="pretrain", part="pretrain/1", gpu="GH200", gpus=64, memory_limit=96 * GB,
        layouts=1234, own=found(1, 4000.0, 50 * GB), own_gpus=128, best=[found(2, 6000.0, 40 * GB)],
        dropped=[found(4, None, None, "ValueError: 7 [heads]")], agreement=0.9, float8=6500.0,
    )  # fmt: skip
    output = io.StringIO()
    show_search(Console(file=output, width=180), search)
    lines = [" ".join(line.split()) for line in output.getvalue().splitlines()]
    assert "pretrain/1 on 64 GPUs: the best of 1,234 layouts; the recipe has 128 GPUs" in lines
    assert "1 40 GB +10.0% 5k 6k 1.50 dp_shard 32, tp 2, sequence parallel, micro-batch 2" in lines
    assert "own 50 GB -12.0% 5k 4k 1.00 dp_shard 64, micro-batch 2" in lines
    assert any(line.endswith("micro-batch 2: ValueError: 7 [heads]") for line in lines)
    assert "their orders agree by 0.90 (Spearman)" in " ".join(lines)
    reason = (
        "changes results and fingerprint; layout 1 with it: 6.5k tokens/s expected, 1.30 of the same without"
    )
    assert f"precision.linear: float8 {reason}" in lines
    assert "stages:\n  pretrain:\n    launch: {tp: 2}\n" in output.getvalue()
