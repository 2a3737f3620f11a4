"""Pieces of a stage: amounts become whole batches, and borders that cannot be are refused."""

from __future__ import annotations

from typing import Any

import pytest

from specs.errors import SpecError
from tests.specs.segments import shape, trajectories


def test_breakpoints_and_budget_are_floored_to_whole_batches() -> None:
    stage = {"global_batch_size": {"0 samples": 4, "41 samples": 8}, "budget": "1005 tokens"}
    found = trajectories(stage)["pretrain"]
    assert shape(found) == [("m", 4, 0, 10), ("m", 8, 40, 17)]
    assert found.tokens == (40 + 56) * 10
    assert found.leftover_tokens == 1005 - found.tokens


def test_steps_are_counted_through_changes_of_the_batch() -> None:
    stage = {
        "global_batch_size": {"0 steps": 4, "10 steps": 8},
        "budget": "15 steps",
        "mixture": {"0 steps": "m", "12 steps": "n"},
    }
    assert shape(trajectories(stage)["pretrain"]) == [("m", 4, 0, 10), ("m", 8, 40, 12), ("n", 8, 56, 15)]


def test_the_published_batch_doubling_falls_on_the_published_iteration() -> None:
    batch = {"0 samples": 1024, "1_718_272_000 samples": 2048}
    stage = {"sequence_length": 4096, "global_batch_size": batch, "budget": "3_662_109_375 samples"}
    found = trajectories(stage)["pretrain"]
    assert found.segments[0].end_step == 1_678_000
    assert found.steps == 1_678_000 + (3_662_109_375 - 1_718_272_000) // 2048 == 2_627_139


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ({"budget": "3 samples"}, "less than one step"),
        (
            {"budget": "10 steps", "global_batch_size": {"0 steps": 4, "12 steps": 8}},
            "breakpoint 480 tokens is after the stage ends at 400",
        ),
        (
            {"budget": "10 steps", "mixture": {"0 steps": "m", "8 steps": "n", "6 steps": "m"}},
            "order the breakpoints",
        ),
        ({"budget": "10 steps", "mixture": {"2 steps": "m"}}, "must begin at 0"),
        ({"budget": "10 steps", "mixture": {"0 steps": "m", "5 bananas": "n"}}, "not a unit"),
        (
            {
                "budget": "10 steps",
                "schedule": {"warmup": "8 steps", "decay": "linear", "decay_over": "8 steps"},
            },
            "do not fit",
        ),
    ],
)
def test_impossible_stages_are_refused_with_the_numbers(stage: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        trajectories({"global_batch_size": 4} | stage)
