"""A part is the same object whether the store alone or a plan leads to it."""

from __future__ import annotations

from collections.abc import Callable

from flows.planning.plan import Plan
from flows.stored_part import StoredPart, planned_part, planned_parts, training_rows
from tests.flows.report.report_store import rows_of, store


def test_a_part_of_a_plan_is_that_of_the_store(done: Plan) -> None:
    for name, planned in planned_parts(done).items():
        stored = StoredPart.of(planned.artifact)
        assert (planned.name, planned.kind, planned.fingerprint) == (name, stored.kind, stored.fingerprint)
        assert planned.inputs == stored.inputs
        assert {read.place for read in planned.inputs.values()} == {r.place for r in stored.inputs.values()}
        assert (planned.state, planned.results, planned.facts) == ("finished", stored.metrics, stored.facts)
        assert (planned.files, planned.versions, planned.created) == (
            stored.files,
            stored.versions,
            stored.created,
        )
        assert list(planned.history()) == list(stored.history())


def test_an_interrupted_part_has_what_its_last_checkpoint_states(planned: Callable[..., Plan]) -> None:
    plan = planned()
    rows = rows_of(plan, "pretrain/1", until=5)
    store(plan, "pretrain/1", rows=rows, until=5, facts={"loss": 4.0, "passes": {"a": 1.0}})
    part = planned_part(plan, plan.graph.nodes["pretrain/1"])
    assert (part.state, part.done_steps, part.manifest, part.results) == ("interrupted", 5, None, {})
    assert (part.metrics, part.facts["passes"]) == ({"loss": 4.0}, {"a": 1.0})
    assert [row["step"] for row in part.history()] == [
        row["step"] for row in training_rows(plan, ["pretrain"])
    ]
    waiting = planned_part(plan, plan.graph.nodes["export"])
    assert (waiting.state, waiting.metrics, list(waiting.history())) == ("not run", {}, [])
