"""Two plans are compared by fields and totals."""

from __future__ import annotations

from collections.abc import Callable

from flows.planning.comparison import compare
from flows.planning.plan import Plan
from tests.recipes import CLUSTER

Planned = Callable[..., Plan]


def test_two_plans_are_compared_by_fields_and_totals(planned: Planned) -> None:
    longer = planned("stages.cooldown.budget=12 steps", CLUSTER)
    found = compare(longer, planned())
    assert found.fields["stages.cooldown.budget"] == ("6 steps", "12 steps")
    assert found.fields["cluster.gpu"] == (None, "H100")
    assert set(found.fields) == {
        "stages.cooldown.budget",
        *(name for name in found.fields if name.startswith("cluster.")),
    }
    before, now = found.totals["tokens"]
    assert now is not None and before is not None and now - before == 6 * 8 * 32
    assert found.totals["gpu_hours"][0] is None
    document = found.to_json()
    assert (
        document["totals"]["tokens"]["difference"] == 6 * 8 * 32
        and document["totals"]["cost"]["difference"] is None
    )
    assert compare(longer, longer).fields == {}
