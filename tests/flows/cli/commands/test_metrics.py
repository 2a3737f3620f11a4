"""`apertus metrics`: the rows of a run as one table."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pyarrow.parquet as pq

from flows.cli.commands.show import as_file
from flows.planning.plan import Plan
from tests.flows.finished import invoke


def test_metrics_are_one_table_keyed_by_run_stage_attempt_and_step(
    done: Plan, recipe: Path, tmp_path: Path
) -> None:
    target = tmp_path / "metrics.parquet"
    result = invoke("metrics", str(recipe), "--store", done.store.url, "--output", str(target))
    assert result.exit_code == 0, result.output
    rows = pq.read_table(target).to_pylist()
    assert {(row["run"], row["stage"], row["part"]) for row in rows} == {
        (done.pipeline.name, "pretrain", "pretrain/1")
    }
    assert len({row["attempt"] for row in rows}) == 1
    assert [(row["step"], row["loss"]) for row in rows[:-1]] == [(step, 1 / step) for step in range(1, 9)]
    assert (rows[-1]["step"], rows[-1]["validation/corpus/notes"]) == (8, 1.0)
    assert f"{len(rows):,} rows are in" in result.output
    assert invoke("metrics", str(recipe), "pretrian", "--store", done.store.url).exit_code == 2


def test_a_table_of_no_rows_is_refused_with_the_reason(done: Plan, recipe: Path, tmp_path: Path) -> None:
    target = tmp_path / "metrics.parquet"
    for store, stages, message in (
        (str(tmp_path / "empty"), [], "pretrain, cooldown: no training is stored in"),
        (done.store.url, ["cooldown", "main"], "cooldown: no training is stored in"),
        (done.store.url, ["main"], "only stages that train have rows. Fix: name some of pretrain, cooldown."),
    ):
        result = invoke("metrics", str(recipe), *stages, "--store", store, "--output", str(target))
        assert (result.exit_code, message in result.output) == (2, True), result.output
    assert not target.exists()


def test_the_ending_decides_the_format_and_all_have_the_same_rows(
    done: Plan, recipe: Path, tmp_path: Path
) -> None:
    targets = {ending: tmp_path / f"rows{ending}" for ending in (".parquet", ".csv", ".JSONL")}
    for target in targets.values():
        result = invoke("metrics", str(recipe), "--store", done.store.url, "--output", str(target))
        assert result.exit_code == 0, result.output
    rows = pq.read_table(targets[".parquet"]).to_pylist()
    with open(targets[".csv"], newline="") as file:
        assert list(csv.DictReader(file)) == [
            {name: "" if value is None else str(value) for name, value in row.items()} for row in rows
        ]
    assert [json.loads(line) for line in targets[".JSONL"].read_text().splitlines()] == [
        {name: value for name, value in row.items() if value is not None} for row in rows
    ]


def test_numbers_that_are_not_finite_are_null_in_json() -> None:
    rows = [{"step": 1, "loss": float("nan")}, {"step": 2, "loss": float("-inf"), "lr": 0.5}]
    lines = as_file(rows, ".jsonl").decode().splitlines()
    assert lines == ['{"step": 1, "loss": null}', '{"step": 2, "loss": null, "lr": 0.5}']
