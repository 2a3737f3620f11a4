"""Tables of an estimate, and of two beside each other."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from flows.cli.tables import estimate as tables
from flows.format import amount, duration, energy, size
from flows.planning.comparison import compare
from flows.planning.plan import Plan, make
from infra.store import Store
from specs.recipe import load
from tests.flows.cli.printing import printed
from tests.recipes import CHAT, CLUSTER, write_recipe


def test_stored_bytes_are_shown_below_the_table_and_not_as_the_size_of_a_checkpoint(
    plans: dict[str, Plan],
) -> None:
    lines = printed(plans["apertus-70b"], 200)
    (whole,) = [line for line in lines if line.startswith(" all ")]
    assert whole.split() == ["all", "6.89e24", "89.1", "d", "5.91M", "3.31", "GWh", "17.7M", "72.5", "GB"]
    # Four of each of seven segments of pretraining, three of SFT, two of each of the five other stages; one
    # more while one is written.
    each = 16 * 70_599_864_480
    assert f"checkpoints: {size(41 * each)} stay, at most {size(42 * each)} at a time" in " ".join(lines)


@pytest.mark.parametrize("width", [80, 100, 140])
def test_a_comparison_fits_the_terminal(plans: dict[str, Plan], width: int) -> None:
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    comparison = compare(plans["apertus-70b"], plans["apertus-8b"])
    tables.show_comparison(console, comparison, "apertus-70b", "apertus-8b")
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= width
    assert lines.index("totals") < lines.index("fields that differ")
    (flops,) = [line.split() for line in lines if line.startswith(" FLOPs")]
    assert flops == ["FLOPs", "7.94e23", "6.89e24", "+767.7%"]
    begin = lines.index(" stages.sft")
    name, *sizes = re.split(r"  +", lines[begin + 1].strip())
    wrapped = lines[begin + 2].strip() if width == 80 else ""
    assert (f"{name} {wrapped}".strip(), sizes) == ("global_batch_size.0 tokens", ["512", "1024"])


@pytest.mark.parametrize("width", [80, 100, 140])
def test_tables_fit_the_terminal(tmp_path: Path, store: Store, width: int) -> None:
    plan = make(load(write_recipe(tmp_path, CHAT), [CLUSTER]), store)
    console = Console(width=width, file=io.StringIO())
    stages, asked = (
        {name: [name] for name in of} for of in (plan.estimates.stages, plan.estimates.inference)
    )
    console.print(tables.estimate_table(plan.estimates, stages, asked, width))
    for table in (tables.memory_table, tables.checkpoint_table):
        console.print(table(plan.estimates, stages, width))
    for table in (tables.segment_table, tables.corpus_table):
        console.print(table(plan.estimates, width))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= width
    for heading in ("GPU-hours", "per GPU", "total", "requests", "core-hours", "temporary"):
        assert any(heading in line for line in lines)
    assert sum(line.lstrip().startswith("longer ") for line in lines) == 3


def test_units_are_readable() -> None:
    assert [duration(seconds) for seconds in (None, 30, 720, 15_000, 5_071_680)] == [
        "-",
        "30 s",
        "12 min",
        "4.17 h",
        "58.7 d",
    ]
    assert [energy(kwh) for kwh in (None, 3.23e6, 214, 0.002)] == ["-", "3.23 GWh", "214 kWh", "2 Wh"]
    assert size(1.13e12) == "1.13 TB"


def test_corpora_are_a_line_of_the_plan_and_a_row_each_of_its_details(plans: dict[str, Plan]) -> None:
    plan = plans["apertus-70b"]
    totals = plan.estimates.totals()
    (line,) = [line for line in printed(plan, 200, terminal=False) if line.startswith("corpora: ")]
    assert line.startswith(f"corpora: {amount(totals['core_hours'])} core-hours, ")
    assert f"{size(totals['corpus_moved_bytes'])} moved" in line
    assert line.endswith("without documents that filters drop, training on embeddings")
    rows = {line.split()[0] for line in printed(plan, 200, details=True) if line.startswith(" corpus/")}
    parts = {part.node.name for part in plan.estimates.corpora["corpus"].parts}
    assert len(parts) == 23 and parts <= rows
