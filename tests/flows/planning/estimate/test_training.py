"""Estimates of a stage from those of its segments. Sums over stages: tests/flows/planning/test_estimate.py"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flows.planning.estimate.training import extent
from flows.planning.plan import Plan
from tests.recipes import CLUSTER

Planned = Callable[..., Plan]


def test_a_stage_shows_the_memory_of_its_largest_segment(planned: Planned) -> None:
    """Its last segment has batches of 8 sequences, the others of 4."""
    stage = planned().estimates.stages["pretrain"]
    assert [part.segment.global_batch_size for part in stage.parts] == [4, 4, 8]
    assert stage.largest is stage.parts[-1]
    assert stage.to_json()["memory_bytes"]["total"] == max(
        part.memory.to_json()["total"] for part in stage.parts
    )


def test_the_time_of_a_step_is_that_of_its_model_flops_at_the_stated_utilisation(planned: Planned) -> None:
    stage = planned(CLUSTER, "launch.mfu=0.25").estimates.stages["pretrain"]
    for part in stage.parts:
        seconds = part.flops / part.node.steps / part.gpus / (0.25 * 989.5e12)
        assert part.step_seconds == pytest.approx(seconds)


def test_a_part_that_does_not_train_has_no_extent(planned: Planned) -> None:
    plan = planned()
    assert set(extent(plan.graph.nodes["tokenizer"]).values()) == {None}
    found = extent(plan.graph.nodes["pretrain/2"])
    assert found == {"start_step": 8, "end_step": 12, "start_tokens": 1024, "end_tokens": 1536}
