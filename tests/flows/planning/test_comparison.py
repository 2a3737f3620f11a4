"""Two plans are compared by fields and totals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from flows.planning.comparison import compare
from flows.planning.plan import Plan, make
from infra.store import Store
from specs.recipe import load
from tests.recipes import CHAT, CLUSTER, write_recipe

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


def test_variants_that_differ_alike_are_named_once(tmp_path: Path, store: Store) -> None:
    more = "{{kind: evaluate, from: cooldown, sources: [corpus/notes], matrix: {{a: {{}}, b: {{}}}}}}"
    path = write_recipe(tmp_path, f"{CHAT}  more: {more}\n")
    found = compare(make(load(path, ["stages.more.samples=3"]), store), make(load(path), store))
    assert found.fields == {"stages.more-a.samples": (64, 3), "stages.more-b.samples": (64, 3)}
    assert found.by_stage == {"more": {"samples": (64, 3)}}
