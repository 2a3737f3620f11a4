"""What `apertus plan` prints: what matters first, like rows as one, nothing cut off at the widths of usual
terminals."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from flows.cli.tables import plan as plan_tables
from flows.cli.tables.plan import FEWEST, folded
from flows.format import amount, flop
from flows.planning.plan import Plan, make
from flows.terminal import LONG_WORD
from infra.store import Store
from specs.intervals import young_daly
from specs.recipe import load
from tests.flows.cli.conftest import RECIPES
from tests.flows.cli.printing import printed, shown
from tests.recipes import RECIPE, write_recipe

Planned = Callable[..., Plan]


def test_the_table_of_a_run_has_the_chosen_stages_alone(planned: Planned) -> None:
    whole, chosen = (
        shown(plan_tables.plan_table(planned(), chosen=names), 140)
        for names in (None, {"tokenizer", "corpus"})
    )
    assert [name for name in planned().steps if name in whole] == list(planned().steps)
    assert [name for name in planned().steps if f" {name} " in chosen] == ["tokenizer", "corpus/notes"]


@pytest.mark.parametrize("details", [False, True])
@pytest.mark.parametrize("width", [80, 100, 140])
@pytest.mark.parametrize("name", ["apertus-8b", "apertus-70b", "apertus-1.5b-100b", "wso"])
def test_a_plan_fits_the_terminal(plans: dict[str, Plan], name: str, width: int, details: bool) -> None:
    lines = printed(plans[name], width, details=details)
    assert max(map(len, lines[1:])) <= width  # the first line is the recipe's own description
    assert not any("…" in line for line in lines)
    heading = next(line for line in lines if line.split()[:2] == ["stage", "GPUs"]).split()
    whole = ["stage", "GPUs", "FLOPs", "time", "GPU-hours", "energy", "cost", "per", "GPU", "checkpoint"]
    left_out = [name for name in whole if name not in heading]
    assert heading == [name for name in whole if name in heading]
    assert left_out in ([], ["energy"], ["energy", "cost"]) and (width < 100 or not left_out)
    assert ("energy" in heading) != any("no room for: energy" in " ".join(pair) for pair in pairwise(lines))
    if details:
        assert any(line.endswith("peak at" if width >= 100 else "total") for line in lines)
        assert "segments of training" in lines


@pytest.mark.parametrize("name", ["apertus-8b", "apertus-70b", "apertus-1.5b-100b", "wso"])
def test_reasons_are_broken_between_words_where_the_terminal_is_narrow(
    plans: dict[str, Plan], name: str
) -> None:
    plan = plans[name]
    words = {word for line in printed(plan, 80) for word in line.split()}
    why = [
        word
        for line in printed(plan, 200)
        if " declared " in line and "unavailable: " in line
        for word in line.split("unavailable: ")[1].split()
    ]
    assert why and {word for word in why if len(word) <= LONG_WORD} <= words


def test_columns_without_a_value_are_left_out(plans: dict[str, Plan]) -> None:
    plan = make(load(RECIPES / "smoke.yaml"), plans["wso"].store)
    lines = printed(plan, 140)
    assert ["stage", "GPUs", "FLOPs", "per", "GPU", "checkpoint"] in [line.split() for line in lines]
    assert not any("no room for" in line for line in lines)


def test_parts_are_counted_in_one_way(plans: dict[str, Plan]) -> None:
    plan = plans["apertus-70b"]
    lines = printed(plan, 140, terminal=False)
    assert len(plan.steps) > plan.parts == 120
    assert any(line.startswith("to do: 120 of 120 parts") for line in lines)
    assert any("the fingerprints of 120 parts are provisional" in line for line in lines)


def test_json_says_what_the_table_says(plans: dict[str, Plan]) -> None:
    document = plans["apertus-8b"].to_json()
    parts = [part for stage in document["stages"] for part in stage["parts"]]
    assert {(part["action"], part["state"]) for part in (*document["stages"], *parts)} == {
        ("run", "declared")
    }


def test_output_is_not_truncated_without_a_terminal(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "flows.cli",
        "plan",
        str(RECIPES / "wso.yaml"),
        "--store",
        str(tmp_path / "none"),
        "--details",
    ]
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    lines = subprocess.run(
        command, check=True, capture_output=True, text=True, env=environment
    ).stdout.splitlines()
    assert not any("no room for" in line for line in lines)
    assert sum(line.split()[-1:] == ["checkpoint"] for line in lines) == 1


def test_totals_are_shown_first_and_advice_last(plans: dict[str, Plan]) -> None:
    lines = printed(plans["apertus-70b"], 140)
    assert lines[1].startswith("in all: 70.6B parameters, 15.2T tokens, 6.89e24 FLOPs, 5.91M GPU-hours")
    titles = ["what would be done", "what it takes", "what training draws"]
    places = [lines.index(title) for title in titles]
    assert places == sorted(places)
    assert lines[-1].startswith("silenced: ")


def test_parts_and_variants_that_are_alike_are_one_row_with_their_sum(plans: dict[str, Plan]) -> None:
    plan = plans["wso"]
    rows = [line.split() for line in printed(plan, 140)]
    sft = [
        plan.graph.nodes[name]
        for name in plan.steps
        if plan.pipeline.family(plan.steps[name].node.stage) == "sft"
    ]
    done, takes = [row for row in rows if row[:3] == ["sft:", "720", "variants"]]
    assert len(sft) == 30 * 3 * 8
    assert done[3:] == [
        "declared",
        amount(720 * 2000),
        amount(720 * 2000 * 128 * 2048),
        flop(sum(node.flops for node in sft)),
    ]
    assert takes[3:5] == ["64", flop(sum(node.flops for node in sft))]
    assert len(printed(plan, 140)) < 150 < len(plan.steps)
    (chosen,) = [line for line in printed(plan, 140, terminal=False) if "is chosen when" in line]
    assert chosen.endswith("(and 89 more like it; --details has them)")


def test_details_have_a_row_for_each_part(plans: dict[str, Plan]) -> None:
    starts = [line.split()[0] for line in printed(plans["apertus-8b"], 140, details=True) if line.strip()]
    assert set(plans["apertus-8b"].steps) <= set(starts)


def test_rows_that_differ_or_are_few_stay_apart(plans: dict[str, Plan]) -> None:
    pipeline = plans["apertus-1.5b-100b"].pipeline
    variants = [name for name in pipeline.stages if name.startswith("pretrain-")]
    few = variants[: FEWEST["variants"] - 1]
    rest = [(name, name, int(name == variants[0])) for name in variants]
    assert [fold.label for fold in folded(pipeline, rest)] == [
        variants[0],
        f"pretrain: {len(variants) - 1} of {len(variants)} variants",
    ]
    assert [fold.label for fold in folded(pipeline, [(name, name, 0) for name in few])] == few
    assert [fold.label for fold in folded(pipeline, [(name, name, 0) for name in variants])] == [
        f"pretrain: {len(variants)} variants"
    ]
    assert [
        fold.label for fold in folded(pipeline, [(name, name, at) for at, name in enumerate(variants)])
    ] == variants
    assert [
        fold.label for fold in folded(pipeline, [(name, name, 0) for name in variants], details=True)
    ] == variants


def test_every_source_is_shown_once_with_the_stage_that_uses_it_most(plans: dict[str, Plan]) -> None:
    plan = plans["apertus-8b"]
    lines = printed(plan, 140)
    begin = lines.index("what training draws")
    rows = [line.split() for line in lines[begin:] if line.startswith(" corpus/")]
    assert [row[0] for row in rows] == list(dict.fromkeys(row[0] for row in rows))
    assert {row[0] for row in rows} == {usage.source for usage in plan.source_usage}
    most = {
        usage.source: max(d.passes for d in plan.source_usage if d.source == usage.source)
        for usage in plan.source_usage
    }
    passes = [float(row[row.index("of") - 1]) for row in rows]
    assert passes == [pytest.approx(most[row[0]], abs=0.005) for row in rows]
    assert passes == sorted(passes, reverse=True)


def test_where_no_terminal_is_each_item_is_one_line(plans: dict[str, Plan]) -> None:
    notes = [
        line
        for line in printed(plans["apertus-8b"], 100, terminal=False)
        if line.startswith("note: unavailable")
    ]
    (note,) = notes
    assert note.endswith("running them needs these inputs") and len(note) > 100


def test_variants_that_get_the_same_advice_get_it_once(plans: dict[str, Plan]) -> None:
    plan = make(load(RECIPES / "wso.yaml", ["silence=[]"]), plans["wso"].store, ask_network=False)
    lines = printed(plan, 100, terminal=False)
    begin = lines.index("advice decay-before-sft")
    assert lines[begin + 1].startswith("  why: ")
    (line,) = lines[begin + 2 :]
    assert line.startswith("  sft-base-wsd-0.1-28-5e-7: ")
    # of the 30 models, four never decay their rate; three seeds and eight rates each
    assert "(and 623 more of sft; --details has them)" in line
    assert (
        sum(line.startswith("  sft") for line in printed(plan, 100, terminal=False, details=True))
        == (30 - 4) * 3 * 8
    )


def test_the_details_of_a_plan_print_the_young_daly_interval(tmp_path: Path) -> None:
    """A node fails every 10 hours; the time that training stands still is what the plan says it is."""
    cluster = (
        "cluster={gpu: H100, gpus_per_node: 4, mfu: 0.4, storage_bandwidth: 1, host_bandwidth: 1e-6,"
        " mean_time_between_failures: 10h}"
    )
    plan = make(load(write_recipe(tmp_path, RECIPE), (cluster,)), Store.open(str(tmp_path / "store")))
    stop = plan.estimates.stages["pretrain"].to_json()["checkpoint"]["copy_seconds"]
    lines = printed(plan, 200, details=True)
    heading = next(place for place, line in enumerate(lines) if "Young/Daly" in line)
    row = next(line for line in lines[heading:] if line.split()[:1] == ["pretrain"])
    cell = row[: lines[heading].index("Young/Daly") + len("Young/Daly")].split()[-2:]
    assert stop > 0
    assert cell == [f"{young_daly(stop, 36_000) / 3600:.3g}", "h"]
