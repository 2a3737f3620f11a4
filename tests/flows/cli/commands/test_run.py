"""`apertus run` of what is finished: names, and protected stages."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.planning.plan import Plan
from flows.planning.run_records import Records
from infra.store import runs
from infra.store.documents import RunEnd
from infra.store.maintenance.garbage import survey
from tests.flows.conftest import finish
from tests.flows.finished import invoke, read_json

Planned = Callable[..., Plan]


def test_a_finished_run_gets_a_name_of_its_own_and_keeps_it_when_the_recipe_moves_on(
    done: Plan, planned: Planned, recipe: Path
) -> None:
    url = done.store.url
    for _ in range(2):
        assert (
            "All 10 parts of keep are finished"
            in invoke("run", str(recipe), "--name", "keep", "--store", url).output
        )
    assert [
        (row["name"], row["records"], row["finished"], row["outcome"])
        for row in read_json("runs", "--store", url, "--json")["runs"]
    ] == [
        ("keep", 1, 10, "finished"),
        ("tiny", 1, 10, "unknown"),
    ]
    finish(planned("stages.export.tolerance=1e-3"), "export")
    assert survey(done.store, grace=0.0).items == []
    runs.forget(done.store, "keep")
    assert [item.path for item in survey(done.store, grace=0.0).items] == [done.graph.nodes["export"].path]


def test_a_gate_that_failed_is_forgotten_when_it_is_loosened_and_nothing_is_to_run(
    done: Plan, recipe: Path
) -> None:
    end = RunEnd(outcome="failed", reason="evaluate: gate", started="2026-01-01T12:00:00+00:00", seconds=9.0)
    Records(done.store, "tiny").write(done.graph, {}, end)
    for chosen, outcome in ((["--only", "corpus"], "failed"), ([], "finished"), ([], "finished")):
        assert invoke("run", str(recipe), "--store", done.store.url, *chosen).exit_code == 0
        (row,) = read_json("runs", "--store", done.store.url, "--json")["runs"]
        assert row["outcome"] == outcome
    assert row["records"] == 3


def test_what_is_protected_after_it_has_finished_is_noted_by_the_next_run(done: Plan, recipe: Path) -> None:
    url, protect = done.store.url, ["--set", "stages.cooldown.protect=true"]
    assert invoke("run", str(recipe), "--store", url, *protect).exit_code == 0
    done.store.remove(done.graph.nodes["cooldown"].path)
    refused = invoke("plan", str(recipe), "--store", url, *protect)
    assert refused.exit_code == 2 and "'cooldown' is protected and had finished" in refused.output


def test_an_import_that_fails_is_told_without_the_file_that_was_read_last(
    planned: Planned, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "flows.execution.flow", None)
    result = invoke("run", str(recipe), "--store", planned().store.url)
    assert result.exit_code == 1
    assert "unexpected ModuleNotFoundError: import of flows.execution.flow halted" in result.output
    assert "read last" not in result.output
