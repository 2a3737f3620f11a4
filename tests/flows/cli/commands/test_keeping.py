"""`apertus runs`, `forget`, `gc` and `cp` over a store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from flows.planning.plan import Plan
from infra.store import Artifact, Store
from infra.store.maintenance.garbage import survey
from tests.flows.conftest import finish
from tests.flows.finished import invoke, read_json

Planned = Callable[..., Plan]


def test_gc_shows_and_removes_nothing_until_it_is_told_to(done: Plan, planned: Planned) -> None:
    url = done.store.url
    heavy = planned("stages.cooldown.optimizer.lr=2e-4", "name=heavy")
    finish(heavy, "cooldown", "evaluate", "export")
    assert [row["name"] for row in read_json("runs", "--store", url, "--json")["runs"]] == ["heavy", "tiny"]
    # all is younger than a day
    assert invoke("gc", "--store", url, "--yes").output.startswith("every file of")
    assert invoke("forget", "heavy", "--store", url).exit_code == 0
    shown = invoke("gc", "--store", url, "--grace", "0s")
    assert "no run reaches it" in shown.output and "nothing is removed without --yes" in shown.output
    paths = {item["path"] for item in read_json("gc", "--store", url, "--grace", "0s", "--json")["items"]}
    assert paths == {heavy.graph.nodes[name].path for name in ("cooldown", "evaluate", "export")}
    assert Artifact(done.store, heavy.graph.nodes["export"].path).complete
    removed = invoke("gc", "--store", url, "--grace", "0s", "--yes")
    assert removed.exit_code == 0 and "of 3 items removed" in removed.output
    assert not done.store.names(heavy.graph.nodes["export"].path)
    assert {step.action for step in planned().steps.values()} == {"reuse"}
    assert survey(done.store, grace=0.0).items == []


def test_a_store_that_is_not_there_is_a_message(tmp_path: Path) -> None:
    for arguments in (["runs"], ["gc"], ["forget", "x"]):
        result = invoke(*arguments, "--store", str(tmp_path / "nothing"))
        assert result.exit_code == 2 and "there is no store at" in result.output
    assert not (tmp_path / "nothing").exists()


def test_a_grace_period_that_is_none_is_a_message(store: Store) -> None:
    result = invoke("gc", "--store", store.url, "--grace", "soon")
    assert result.exit_code == 2 and "'soon' is not a duration" in result.output
