"""What `apertus runs` lists: how runs ended, and their metrics."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flows.cli.tables.runs import NO_END, named_runs, runs_table
from flows.planning.plan import Plan
from flows.planning.run_records import Records
from infra.store import Store, StoreError
from infra.store.documents import RunEnd
from infra.store.writing.lease import Leases
from tests.flows.cli.printing import shown
from tests.flows.conftest import finish
from tests.flows.finished import invoke, read_json

Planned = Callable[..., Plan]
FAILED = (
    "evaluate: gate on perplexity: 1e+04 is above the allowed 1000\nexport: not run, since evaluate did not"
)


def test_a_run_is_listed_with_the_parts_that_are_finished(done: Plan) -> None:
    (row,) = named_runs(done.store)
    assert (row.name, row.records, row.parts, row.finished) == ("tiny", 1, 10, 10)
    assert (row.outcome, row.reason, row.seconds) == ("unknown", NO_END, None)
    done.store.remove(done.graph.nodes["export"].path)
    assert named_runs(done.store)[0].finished == 9


def test_a_run_that_ended_is_listed_with_its_outcome_its_time_and_the_reason(done: Plan) -> None:
    end = RunEnd(outcome="failed", reason=FAILED, started="2026-01-01T12:00:00+00:00", seconds=90.0)
    Records(done.store, "tiny").write(done.graph, {}, end)
    (row,) = named_runs(done.store)
    assert (row.outcome, row.reason, row.seconds) == ("failed", FAILED, 90.0)
    assert row.started == "2026-01-01T12:00:00+00:00"
    text = shown(runs_table(done.store, [row]), 200)
    assert "failed" in text and "1.5 min" in text
    assert "gate on perplexity: 1e+04 is above the allowed 1000; and 1 more" in " ".join(text.split())
    assert row.finished == 10
    # parts that an older run has finished, and this one did not reach
    failed = end.model_copy(update={"unfinished": ["evaluate", "export"]})
    Records(done.store, "tiny").write(done.graph, {}, failed)
    (row,) = named_runs(done.store, ["evaluate:perplexity"])
    assert row.finished == 8 and row.metrics
    # the next start has not ended
    Records(done.store, "tiny").write(done.graph, {})
    assert named_runs(done.store)[0].outcome == "unknown"


def test_a_run_whose_parts_somebody_works_on_is_running(done: Plan) -> None:
    node = done.graph.nodes["export"]
    done.store.remove(node.path)
    leases = Leases(done.store, node.path)
    lease = leases.claim("attempt-1", leases.look())
    assert lease is not None
    (row,) = named_runs(done.store)
    assert row.outcome == "running" and row.reason.startswith("held by attempt attempt-1 on ")
    lease.release()
    assert named_runs(done.store)[0].outcome == "unknown"


@pytest.fixture
def three(planned: Planned, store: Store) -> Store:
    """Three runs that differ in the perplexity of their evaluations; the last one has none yet."""
    for name, lr, perplexity in (("a", 1e-2, 12.0), ("b", 2e-2, 7.5), ("c", 3e-2, None)):
        plan = planned(f"name={name}", f"stages.cooldown.optimizer.lr={lr}")
        finish(plan, *(node for node in plan.graph.nodes if node != "evaluate"))
        if perplexity is not None:
            finish(plan, "evaluate", metrics={"perplexity": perplexity, "perplexity/corpus/notes": 1.0})
    return store


def test_runs_are_compared_by_any_metric_the_smallest_value_first(three: Store) -> None:
    rows = named_runs(three, ["evaluate:perplexity"])
    assert [(row.name, row.metrics) for row in rows] == [
        ("b", {"evaluate:perplexity": 7.5}),
        ("a", {"evaluate:perplexity": 12.0}),
        ("c", {}),
    ]
    lines = [line.split() for line in shown(runs_table(three, rows), 200).splitlines()]
    assert ["b", "unknown", "7.5"] in lines and ["c", "unknown", "-"] in lines
    (found,) = {frozenset(row.metrics) for row in named_runs(three, ["perplexity/*"]) if row.metrics}
    assert found == {"evaluate:perplexity/corpus/notes"}
    both = read_json(
        "runs", "--store", three.url, "--metrics", "evaluate:*", "--metrics", "train.tokens", "--json"
    )
    assert both["runs"][0]["metrics"]["evaluate:perplexity/corpus/notes"] == 1.0
    a, b = (row.name for row in rows[:2])  # of which diff takes two
    assert "7.5" in invoke("diff", f"{a}:evaluate", f"{b}:evaluate", "--store", three.url).output


def test_a_metric_that_no_run_has_is_an_error_with_the_nearest_name(three: Store) -> None:
    with pytest.raises(StoreError, match=r"no run has a metric 'perplexty'.*did you mean 'perplexity'"):
        named_runs(three, ["perplexty"])
