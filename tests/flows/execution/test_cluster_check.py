"""What a plan says of a Ray cluster before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from flows.execution.cluster_check import cluster_notes
from flows.planning.plan import Plan, make
from infra.store import Store
from specs.errors import StageError
from specs.profiles import Profile
from specs.recipe import load

SMOKE = "specs/recipes/smoke.yaml"


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make(load(SMOKE, ["stages.pretrain.launch.processes=2"]), Store.open("memory://cluster-check"))


def _profile(address: str = "nowhere:1", **ray: Any) -> Profile:
    settings = {"address": address, "gpus": False, **ray}
    return Profile.model_validate({"launcher": "ray", "executor": "ray", "ray": settings})


def test_a_run_without_the_cluster_asks_it_nothing(plan: Plan) -> None:
    assert cluster_notes(plan, Profile(), plan.pipeline.stages) == []
    assert cluster_notes(plan, _profile(), []) == []


def test_a_cluster_that_is_not_there_is_an_error(plan: Plan) -> None:
    with pytest.raises(StageError, match="no Ray cluster answers at nowhere:1"):
        cluster_notes(plan, _profile(), plan.pipeline.stages)


def test_stages_that_no_node_has_room_for_are_named(plan: Plan, ray_address: str) -> None:
    token, *rooms = cluster_notes(plan, _profile(ray_address, cpus_per_node=2), plan.pipeline.stages)
    assert token.startswith("the Ray cluster has no token: whoever reaches its ports can run code. Fix: ")
    assert [room.partition(";")[0] for room in rooms] == [
        "pretrain/1, pretrain/2: the Ray cluster has no room for 2 nodes with 2 CPUs, 0 GPUs, 0.0 GiB",
        "cooldown, evaluate: the Ray cluster has no room for 1 node with 2 CPUs, 0 GPUs, 0.0 GiB",
    ]
    assert all("has 1 CPUs" in room for room in rooms)
    for profile in (_profile(ray_address), _profile(ray_address, cpus_per_node=2, grows=True)):
        assert cluster_notes(plan, profile, ["corpus", "pretrain"]) == [token]
