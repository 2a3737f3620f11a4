"""Segments: whole batches, exact borders, and nothing before a border depends on what lies behind it."""

from __future__ import annotations

from typing import Any

import pytest

from specs.dependencies import order
from specs.document import Document
from specs.errors import SpecError
from specs.recipe import validate
from specs.trajectory import Trajectory, resolve

MODEL = {"flavour": "mini"}


def trajectories(pretrain: dict[str, Any], **stages: dict[str, Any]) -> dict[str, Trajectory]:
    base = {"kind": "pretrain", "model": MODEL, "sequence_length": 10, "mixture": "m", "optimizer": {"lr": 1e-3}}
    document = {
        "name": "t",
        "sources": {"s": {"url": "/nowhere", "format": "text"}},
        "stages": {
            "tok": {"kind": "tokenizer", "sources": ["s"], "vocab_size": 512},
            "c": {"kind": "corpus", "tokenizer": "tok", "sources": {"s": {}}},
            "m": {"kind": "mixture", "weights": {"c/s": 1}},
            "n": {"kind": "mixture", "weights": {"c/s": 1}, "seed": 2},
            "pretrain": base | pretrain,
            **stages,
        },
    }
    pipeline = validate(Document("t.yaml", document))
    return resolve(pipeline, order(pipeline))


def shape(trajectory: Trajectory) -> list[tuple[str, int, int, int]]:
    """(mixture, batch, first sample, end step) of every segment."""
    return [(segment.mixture, segment.batch, segment.start_sample, segment.end_step) for segment in trajectory.segments]


def test_two_breakpoints_make_three_segments() -> None:
    mixture, batch = {"0 tokens": "m", "400 tokens": "n"}, {"0 tokens": 4, "800 tokens": 8}
    stage = {"mixture": mixture, "global_batch_size": batch, "budget": "1200 tokens"}
    assert shape(trajectories(stage)["pretrain"]) == [("m", 4, 0, 10), ("n", 4, 40, 20), ("n", 8, 80, 25)]


def test_breakpoints_and_budget_are_floored_to_whole_batches() -> None:
    stage = {"global_batch_size": {"0 samples": 4, "41 samples": 8}, "budget": "1005 tokens"}
    found = trajectories(stage)["pretrain"]
    assert shape(found) == [("m", 4, 0, 10), ("m", 8, 40, 17)]
    assert found.tokens == (40 + 56) * 10
    assert found.leftover_tokens == 1005 - found.tokens


def test_steps_are_counted_through_changes_of_the_batch() -> None:
    stage = {"global_batch_size": {"0 steps": 4, "10 steps": 8}, "budget": "15 steps", "mixture": {"0 steps": "m", "12 steps": "n"}}
    assert shape(trajectories(stage)["pretrain"]) == [("m", 4, 0, 10), ("m", 8, 40, 12), ("n", 8, 56, 15)]


def test_longer_budget_changes_only_the_end_of_the_last_segment() -> None:
    stage = {"global_batch_size": {"0 samples": 4, "40 samples": 8}, "budget": "15 steps", "schedule": {"warmup": "100 tokens"}}
    short, long = trajectories(stage)["pretrain"], trajectories(stage | {"budget": "30 steps"})["pretrain"]
    assert short.segments[0] == long.segments[0]
    assert short.segments[1].schedule == long.segments[1].schedule
    assert short.segments[1].start_step == long.segments[1].start_step


def test_decay_starts_a_segment_and_does_not_change_earlier_ones() -> None:
    stage = {"global_batch_size": 4, "budget": "20 steps", "schedule": {"decay": "linear", "decay_over": "5 steps", "final": 0.0}}
    found = trajectories(stage)["pretrain"]
    assert [segment.end_step for segment in found.segments] == [15, 20]
    assert found.segments[0].schedule.decay == "none"
    assert (found.segments[1].schedule.decay_start, found.segments[1].schedule.decay_tokens) == (600, 200)
    assert found.segments[1].schedule.lr(700) == pytest.approx(0.5e-3)


def test_the_published_batch_doubling_falls_on_the_published_iteration() -> None:
    batch = {"0 samples": 1024, "1_718_272_000 samples": 2048}
    stage = {"sequence_length": 4096, "global_batch_size": batch, "budget": "3_662_109_375 samples"}
    found = trajectories(stage)["pretrain"]
    assert found.segments[0].end_step == 1_678_000
    assert found.steps == 1_678_000 + (3_662_109_375 - 1_718_272_000) // 2048 == 2_627_139


def test_a_cooldown_inherits_and_starts_from_the_rate_at_the_branch_point() -> None:
    stage = {"global_batch_size": {"0 steps": 4, "10 steps": 8}, "budget": "20 steps", "optimizer": {"lr": 1e-3, "weight_decay": 0.3}}
    stage |= {"schedule": {"warmup": "10 steps"}}
    cooldown = {"kind": "cooldown", "from": "pretrain@step=5", "mixture": "n", "budget": "8 steps"}
    found = trajectories(stage, cooldown=cooldown)["cooldown"]
    assert found.optimizer.lr == pytest.approx(0.5e-3)  # half of the warm-up
    assert found.optimizer.weight_decay == 0.3
    assert found.segments[0].batch == 4
    assert found.segments[0].schedule.lr(8 * 40) == pytest.approx(0.5e-4)  # 0.1 of the peak at the end


@pytest.mark.parametrize(("stated", "expected"), [({}, None), ({"goldfish": {"k": 4}}, 4), ({"goldfish": None}, None)])
def test_goldfish_defaults_to_the_parents(stated: dict[str, Any], expected: int | None) -> None:
    stage = {"global_batch_size": 4, "budget": "20 steps", "goldfish": None}
    found = trajectories(stage, cooldown={"kind": "cooldown", "from": "pretrain", "mixture": "n", "budget": "8 steps"} | stated)
    goldfish = found["cooldown"].goldfish
    assert (goldfish and goldfish.k) == expected
    default = trajectories({"global_batch_size": 4, "budget": "20 steps"})["pretrain"].goldfish
    assert default is not None
    assert (default.k, default.h) == (50, 50)


@pytest.mark.parametrize(("selector", "segment", "step"), [("", 1, 20), ("@step=10", 0, 10), ("@step=11", 1, 11), ("@tokens=490", 1, 11)])
def test_a_branch_point_is_found_in_its_segment(selector: str, segment: int, step: int) -> None:
    stage = {"global_batch_size": {"0 steps": 4, "10 steps": 8}, "budget": "20 steps"}
    cooldown = {"kind": "cooldown", "from": f"pretrain{selector}", "mixture": "n", "budget": "8 steps"}
    parent = trajectories(stage, cooldown=cooldown)["cooldown"].parent
    assert parent is not None
    assert (parent.segment, parent.step) == (segment, step)


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ({"budget": "3 samples"}, "less than one step"),
        ({"budget": "10 steps", "global_batch_size": {"0 steps": 4, "12 steps": 8}}, "lies behind the end"),
        ({"budget": "10 steps", "mixture": {"0 steps": "m", "8 steps": "n", "6 steps": "m"}}, "order the borders"),
        ({"budget": "10 steps", "mixture": {"2 steps": "m"}}, "must begin at 0"),
        ({"budget": "10 steps", "mixture": {"0 steps": "m", "5 bananas": "n"}}, "not a unit"),
        ({"budget": "10 steps", "schedule": {"warmup": "8 steps", "decay": "linear", "decay_over": "8 steps"}}, "do not fit"),
    ],
)
def test_impossible_stages_are_refused_with_the_numbers(stage: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        trajectories({"global_batch_size": 4} | stage)


def test_a_branch_point_outside_the_parent_is_refused() -> None:
    cooldown = {"kind": "cooldown", "from": "pretrain@step=21", "mixture": "n", "budget": "8 steps"}
    with pytest.raises(SpecError, match="has 20 steps"):
        trajectories({"global_batch_size": 4, "budget": "20 steps"}, cooldown=cooldown)


def rates(chain: list[Trajectory]) -> list[float]:
    """The learning rate of every step of a chain of stages."""
    return [trajectory.lr_at(step) for trajectory in chain for step in range(trajectory.steps)]


def test_rate_is_continuous_at_the_start_of_a_stage_without_a_peak() -> None:
    cooldown = {"kind": "cooldown", "from": "pretrain", "mixture": "n", "budget": "40 steps", "schedule": {"decay": "1-sqrt", "final": 0.1}}
    longer = {
        "kind": "long_context",
        "from": "cooldown",
        "steps": [{"sequence_length": 20, "rope_theta": 1e6, "mixture": "m", "budget": "5 steps", "global_batch_size": 2}],
    }
    pretrain = {"global_batch_size": 4, "budget": "30 steps", "schedule": {"warmup": "10 steps", "warmup_from": 0.1}}
    found = trajectories(pretrain, cooldown=cooldown, long=longer)
    seen = rates([found["pretrain"], found["cooldown"], found["long/1"]])
    rising = [1e-3 * (0.1 + 0.9 * step / 10) for step in range(10)]
    falling = [1e-3 * (0.1 + 0.9 * (1 - (step / 40) ** 0.5)) for step in range(40)]
    assert seen == pytest.approx([*rising, *([1e-3] * 20), *falling, *([1e-4] * 5)], rel=1e-12)


def test_stated_peak_changes_the_rate_at_the_branch_point() -> None:
    cooldown = {"kind": "cooldown", "from": "pretrain", "mixture": "n", "budget": "4 steps", "optimizer": {"lr": 5e-4}}
    found = trajectories({"global_batch_size": 4, "budget": "3 steps"}, cooldown=cooldown)
    assert rates([found["pretrain"], found["cooldown"]])[2:4] == [1e-3, 5e-4]


def test_without_a_decay_the_next_stage_starts_from_the_peak() -> None:
    """Warm-up, stable, only (WSO, arXiv 2603.16127): the peak goes on to the fine-tuning, from any checkpoint."""
    tune = {"kind": "cooldown", "from": "pretrain@step=20", "mixture": "n", "budget": "4 steps", "schedule": {"decay": "none"}}
    found = trajectories({"global_batch_size": 4, "budget": "30 steps", "schedule": {"warmup": "10 steps"}}, tune=tune)
    assert rates([found["tune"]]) == [1e-3] * 4
