"""What a run notes of its parts outlives them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flows.planning.plan import Plan
from flows.planning.run_records import Records
from infra.store import Store
from specs.errors import SpecError
from tests.flows.conftest import finish

Planned = Callable[..., Plan]


PROTECTED = "stages.pretrain.protect=true"


def protect(plan: Plan) -> None:
    """What a run notes when a part of a protected stage has finished."""
    for node in plan.graph.of("pretrain"):
        Records(plan.store, plan.pipeline.name).protect(node)


@pytest.mark.parametrize("what", ["pretrain", "pretrain/2", "manifest"])
def test_lost_result_of_a_protected_stage_is_reported(planned: Planned, store: Store, what: str) -> None:
    plan = planned(PROTECTED)
    finish(plan)
    protect(plan)
    node = plan.graph.nodes["pretrain/2"]
    gone = {
        "pretrain": "pretrain",
        "pretrain/2": node.path,
        "manifest": f"{node.path}/manifest-00000012.json",
    }[what]
    store.remove(gone)
    part = "pretrain/1" if what == "pretrain" else "pretrain/2"
    with pytest.raises(
        SpecError,
        match=(
            rf"'{part}' is protected and had finished; pretrain/\w+ is no longer complete in the store\."
            r" Fix: bring it back"
        ),
    ):
        planned(PROTECTED)
    assert planned().steps[part].action != "reuse"
