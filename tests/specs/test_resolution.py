"""Segments: whole batches, exact breakpoints, and no dependence on what comes after a breakpoint."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specs.errors import SpecError
from specs.schedule import Schedule
from specs.trajectory import Trajectory
from tests.specs.segments import shape, trajectories


def test_two_breakpoints_make_three_segments() -> None:
    mixture, batch = {"0 tokens": "m", "400 tokens": "n"}, {"0 tokens": 4, "800 tokens": 8}
    stage = {"mixture": mixture, "global_batch_size": batch, "budget": "1200 tokens"}
    assert shape(trajectories(stage)["pretrain"]) == [("m", 4, 0, 10), ("n", 4, 40, 20), ("n", 8, 80, 25)]


def test_longer_budget_changes_only_the_end_of_the_last_segment() -> None:
    stage = {
        "global_batch_size": {"0 samples": 4, "40 samples": 8},
        "budget": "15 steps",
        "schedule": {"warmup": "100 tokens"},
    }
    short, long = trajectories(stage)["pretrain"], trajectories(stage | {"budget": "30 steps"})["pretrain"]
    assert short.segments[0] == long.segments[0]
    assert short.segments[1].schedule == long.segments[1].schedule
    assert short.segments[1].start_step == long.segments[1].start_step


def test_decay_starts_a_segment_and_does_not_change_earlier_ones() -> None:
    stage = {
        "global_batch_size": 4,
        "budget": "20 steps",
        "schedule": {"decay": "linear", "decay_over": "5 steps", "final": 0.0},
    }
    found = trajectories(stage)["pretrain"]
    assert [segment.end_step for segment in found.segments] == [15, 20]
    assert found.segments[0].schedule.decay == "none"
    assert (found.segments[1].schedule.decay_start, found.segments[1].schedule.decay_tokens) == (600, 200)
    assert found.settings.optimizer.lr * found.segments[1].schedule.factor(700) == pytest.approx(0.5e-3)


def test_a_cooldown_inherits_and_starts_from_the_rate_at_the_branch_point() -> None:
    stage = {
        "global_batch_size": {"0 steps": 4, "10 steps": 8},
        "budget": "20 steps",
        "optimizer": {"lr": 1e-3, "weight_decay": 0.3},
    }
    stage |= {"schedule": {"warmup": "10 steps"}}
    cooldown = {"kind": "cooldown", "from": "pretrain@step=5", "mixture": "n", "budget": "8 steps"}
    found = trajectories(stage, cooldown=cooldown)["cooldown"]
    assert found.settings.optimizer.lr == pytest.approx(0.5e-3)  # half of the warm-up
    assert found.settings.optimizer.weight_decay == 0.3
    assert found.segments[0].batch == 4
    assert found.settings.optimizer.lr * found.segments[0].schedule.factor(8 * 40) == pytest.approx(
        0.5e-4
    )  # 0.1 of the peak at the end


@pytest.mark.parametrize(
    ("stated", "expected"), [({}, None), ({"goldfish": {"k": 4}}, 4), ({"goldfish": None}, None)]
)
def test_goldfish_defaults_to_the_parents(stated: dict[str, Any], expected: int | None) -> None:
    stage = {"global_batch_size": 4, "budget": "20 steps", "goldfish": None}
    found = trajectories(
        stage, cooldown={"kind": "cooldown", "from": "pretrain", "mixture": "n", "budget": "8 steps"} | stated
    )
    goldfish = found["cooldown"].settings.goldfish
    assert (goldfish and goldfish.k) == expected
    default = trajectories({"global_batch_size": 4, "budget": "20 steps"})["pretrain"].settings.goldfish
    assert default is not None
    assert (default.k, default.h) == (50, 50)


@pytest.mark.parametrize(
    ("selector", "segment", "step"),
    [("", 1, 20), ("@step=10", 0, 10), ("@step=11", 1, 11), ("@tokens=490", 1, 11)],
)
def test_a_branch_point_is_found_in_its_segment(selector: str, segment: int, step: int) -> None:
    stage = {"global_batch_size": {"0 steps": 4, "10 steps": 8}, "budget": "20 steps"}
    cooldown = {"kind": "cooldown", "from": f"pretrain{selector}", "mixture": "n", "budget": "8 steps"}
    parent = trajectories(stage, cooldown=cooldown)["cooldown"].parent
    assert parent is not None
    assert (parent.segment, parent.step) == (segment, step)


def test_a_branch_point_outside_the_parent_is_refused() -> None:
    cooldown = {"kind": "cooldown", "from": "pretrain@step=21", "mixture": "n", "budget": "8 steps"}
    with pytest.raises(SpecError, match="has 20 steps"):
        trajectories({"global_batch_size": 4, "budget": "20 steps"}, cooldown=cooldown)


def rates(chain: list[Trajectory]) -> list[float]:
    """The learning rate of every step of a chain of stages."""
    return [trajectory.lr_at(step) for trajectory in chain for step in range(trajectory.steps)]


def test_rate_is_continuous_at_the_start_of_a_stage_without_a_peak() -> None:
    cooldown = {
        "kind": "cooldown",
        "from": "pretrain",
        "mixture": "n",
        "budget": "40 steps",
        "schedule": {"decay": "1-sqrt", "final": 0.1},
    }
    longer = {
        "kind": "long_context",
        "from": "cooldown",
        "steps": [
            {
                "sequence_length": 20,
                "rope_theta": 1e6,
                "mixture": "m",
                "budget": "5 steps",
                "global_batch_size": 2,
            }
        ],
    }
    pretrain = {
        "global_batch_size": 4,
        "budget": "30 steps",
        "schedule": {"warmup": "10 steps", "warmup_from": 0.1},
    }
    found = trajectories(pretrain, cooldown=cooldown, long=longer)
    seen = rates([found["pretrain"], found["cooldown"], found["long/1"]])
    rising = [1e-3 * (0.1 + 0.9 * step / 10) for step in range(10)]
    falling = [1e-3 * (0.1 + 0.9 * (1 - (step / 40) ** 0.5)) for step in range(40)]
    assert seen == pytest.approx([*rising, *([1e-3] * 20), *falling, *([1e-4] * 5)], rel=1e-12)


def test_stated_peak_changes_the_rate_at_the_branch_point() -> None:
    cooldown = {
        "kind": "cooldown",
        "from": "pretrain",
        "mixture": "n",
        "budget": "4 steps",
        "optimizer": {"lr": 5e-4},
    }
    found = trajectories({"global_batch_size": 4, "budget": "3 steps"}, cooldown=cooldown)
    assert rates([found["pretrain"], found["cooldown"]])[2:4] == [1e-3, 5e-4]


def test_without_a_decay_the_next_stage_starts_from_the_peak() -> None:
    """Warm-up, stable, only (WSO, arXiv 2603.16127): the peak goes on to the fine-tuning, from any
    checkpoint."""
    tune = {
        "kind": "cooldown",
        "from": "pretrain@step=20",
        "mixture": "n",
        "budget": "4 steps",
        "schedule": {"decay": "none"},
    }
    found = trajectories(
        {"global_batch_size": 4, "budget": "30 steps", "schedule": {"warmup": "10 steps"}}, tune=tune
    )
    assert rates([found["tune"]]) == [1e-3] * 4


# `rest of parent`

REST_OF_ALL = dict.fromkeys(["mixture", "global_batch_size", "schedule", "budget"], "rest of parent")
ANNEALED = {
    "kind": "mixture",
    "weights": {"c/s": 1, "c/t": 3},
    "anneal": {"to": {"c/s": 1}, "over": "30 samples", "pieces": 3},
}


def rest(point: str, **fields: Any) -> dict[str, Any]:
    """A stage that continues another from a point."""
    return {"kind": "cooldown", "from": point, **REST_OF_ALL, **fields}


@st.composite
def stages(draw: st.DrawFn) -> dict[str, Any]:
    """Pretraining with borders of batch and mixture, warm-up and decay anywhere, in tokens or samples of
    ten tokens."""

    def pieces(values: st.SearchStrategy[Any]) -> dict[str, Any]:
        """Values by where they begin, at least 31 samples apart."""
        begins = [
            begin + draw(st.integers(0, 9))
            for begin in sorted(draw(st.sets(st.sampled_from([40, 80, 120, 160]))))
        ]
        tokens = draw(st.booleans())
        return {
            f"{begin * 10} tokens" if tokens else f"{begin} samples": draw(values) for begin in [0, *begins]
        }

    schedule = {
        "decay": draw(st.sampled_from(["none", "linear", "1-sqrt", "cosine"])),
        "final": draw(st.sampled_from([0.05, 0.3, 0.7])),
    }
    if draw(st.booleans()):
        schedule |= {
            "warmup": f"{draw(st.integers(1, 800))} tokens",
            "warmup_from": draw(st.sampled_from([0.0, 0.1])),
        }
    if draw(st.booleans()):
        schedule["decay_over"] = f"{draw(st.integers(1, 1200))} tokens"
    return {
        "global_batch_size": pieces(st.integers(1, 5)),
        "mixture": pieces(st.sampled_from(["m", "n", "annealed"])),
        "budget": f"{draw(st.integers(2000, 3000))} tokens",
        "schedule": schedule,
    }


def each_step(chain: list[Trajectory]) -> list[tuple[float, int, str]]:
    """Learning rate, batch and mixture of every step, as the segments that are trained state them."""
    return [
        (
            (trajectory.settings.optimizer.lr or 0.0) * segment.schedule.factor(trajectory.tokens_at(step)),
            segment.batch,
            segment.mixture,
        )
        for trajectory in chain
        for segment in trajectory.segments
        for step in range(segment.start_step, segment.end_step)
    ]


@settings(max_examples=150)
@given(stages(), st.data())
def test_the_rest_of_the_parent_is_what_it_would_have_done_in_every_step(
    stage: dict[str, Any], data: st.DataObject
) -> None:
    whole = trajectories(stage, annealed=ANNEALED)["pretrain"]
    first = data.draw(st.integers(1, whole.steps - 1), label="first point")
    second = data.draw(st.integers(1, max(1, whole.steps - first - 1)), label="second point")
    found = trajectories(
        stage | {"stop_at": f"{first} steps"},
        annealed=ANNEALED,
        one=rest(f"pretrain@step={first}", stop_at=f"{second} steps"),
        two=rest(f"one@step={second}") if first + second < whole.steps else rest(f"pretrain@step={first}"),
    )
    chain = [found["pretrain"], found["one"]] + ([found["two"]] if first + second < whole.steps else [])
    assert [trajectory.steps for trajectory in chain[:2]] == [first, second]
    assert each_step(chain) == each_step([whole])
    assert sum(trajectory.tokens for trajectory in chain) == whole.tokens


STAGE = {
    "global_batch_size": {"0 steps": 4, "10 steps": 8},
    "budget": "20 steps",
    "mixture": {"0 steps": "m", "12 steps": "n"},
}


def test_what_is_stated_beside_the_rest_of_the_parent_replaces_it() -> None:
    one = trajectories(STAGE, one=rest("pretrain@step=5", budget="3 steps"))["one"]
    assert shape(one) == [("m", 4, 0, 3)]  # the borders after that are dropped
    one = trajectories(STAGE, one=rest("pretrain@step=5", mixture={"0 steps": "n", "6 steps": "m"}))["one"]
    assert shape(one) == [("n", 4, 0, 5), ("n", 8, 20, 6), ("m", 8, 28, 15)]
    one = trajectories(STAGE, one=rest("pretrain@step=5", global_batch_size=2))["one"]
    assert shape(one) == [("m", 2, 0, 18), ("n", 2, 36, 50)]
    one = trajectories(STAGE, one=rest("pretrain@step=5", sequence_length=20))["one"]
    # half as many sequences, floored to whole batches
    assert shape(one) == [("m", 4, 0, 2), ("m", 8, 8, 3), ("n", 8, 16, 7)]
    stage = STAGE | {"schedule": {"decay": "linear", "decay_over": "800 tokens", "final": 0.0}}
    one = trajectories(stage, one=rest("pretrain@step=15", optimizer={"lr": 5e-3}))["one"]
    assert [one.lr_at(step) for step in range(6)] == pytest.approx(
        [5e-3 * left / 10 for left in (5, 4, 3, 2, 1, 0)]
    )


def test_at_the_end_of_the_parent_its_last_batch_and_mixture_continue() -> None:
    one = trajectories(STAGE, one=rest("pretrain", budget="3 steps"))["one"]
    assert (shape(one), one.lr_at(2)) == ([("n", 8, 0, 3)], 1e-3)


def test_a_schedule_leaves_out_what_ends_before_its_segment_begins() -> None:
    stage = STAGE | {"schedule": {"warmup": "100 tokens", "decay": "linear", "decay_over": "400 tokens"}}
    early, late = (trajectories(stage, one=rest(f"pretrain@step={step}"))["one"].segments for step in (2, 5))
    assert early[0].schedule == Schedule(offset=80, warmup_tokens=100)
    assert late[0].schedule == early[1].schedule == Schedule()
    assert late[-1].schedule == Schedule(
        offset=200, decay="linear", decay_start=800, decay_tokens=400, final=0.1
    )


def test_a_stage_that_is_stopped_keeps_the_schedule_of_its_whole_budget() -> None:
    stage = STAGE | {"schedule": {"warmup": "100 tokens", "decay": "cosine"}}
    whole, stopped = (trajectories(stage | more)["pretrain"] for more in ({}, {"stop_at": "500 tokens"}))
    assert shape(stopped) == [("m", 4, 0, 10), ("m", 8, 40, 11)]
    assert [segment.schedule for segment in stopped.segments] == [
        segment.schedule for segment in whole.segments[:2]
    ]
    assert (stopped.steps, stopped.planned, stopped.leftover_tokens) == (11, whole.segments, 0)


CONVERSATIONS = {"kind": "conversations", "tokenizer": "tok", "sources": {"talks": {}}}
SFT = {
    "kind": "sft",
    "from": "pretrain",
    "conversations": "chat",
    "budget": "4 steps",
    "schedule": {"decay": "none"},
}


@pytest.mark.parametrize(
    ("stage", "others", "message"),
    [
        (
            {},
            {"one": rest("pretrain")},
            r"one\.budget: 'pretrain' is the end of 'pretrain': nothing of its budget is left",
        ),
        (
            {"stop_at": "21 steps"},
            {},
            r"pretrain\.stop_at: 21 steps is after the end of the stage at 1,200 tokens",
        ),
        ({"stop_at": "9 tokens"}, {}, r"pretrain\.stop_at: 9 tokens is less than one step of 40 tokens"),
        (
            {"stop_at": "5 steps"},
            {"one": rest("pretrain@step=6")},
            "'pretrain@step=6' is outside stage 'pretrain', which has 5 steps",
        ),
        (
            {"budget": "rest of parent"},
            {},
            "a pretrain stage has no parent, and so no rest of parent for budget",
        ),
        (
            {"schedule": "rest of parent"},
            {},
            "a pretrain stage has no parent, and so no rest of parent for schedule",
        ),
        ({"budget": "rest of parents"}, {}, r"pretrain\.budget: 'rest of parents' is not an amount"),
        (
            {"schedule": {"decay": "linear", "final": 0}},
            {"one": rest("pretrain", budget="2 steps")},
            r"one\.schedule: .*decayed to 0",
        ),
        (
            {},
            {"chat": CONVERSATIONS, "sft": SFT, "one": rest("sft@step=2")},
            r"one\.mixture: 'sft' trains on no mixture",
        ),
        (
            {},
            {
                "all": {"kind": "merge", "checkpoints": ["pretrain", "pretrain@step=9"]},
                "one": rest("all", carry=["weights"]),
            },
            r"one\.mixture: 'all' trains on no mixture",
        ),
    ],
)
def test_rest_of_parent_is_refused_where_the_parent_has_none(
    stage: dict[str, Any], others: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        trajectories(STAGE | stage, **others)


@pytest.mark.parametrize("stage", ["merge", "select"])
def test_checkpoints_of_different_models_are_refused_by_the_fields_that_differ(stage: str) -> None:
    model = {"flavour": "mini", "n_layers": 5, "activation": "swiglu"}
    budget = {"global_batch_size": 4, "budget": "20 steps", "validation": {"interval": 5}}
    both = {"both": {"kind": stage, "checkpoints": ["pretrain", "other"]}}
    if stage == "select":
        both["both"]["metric"] = "val_loss"
    other = {"kind": "pretrain", "mixture": "m", "sequence_length": 10, "optimizer": {"lr": 1e-3}}
    with pytest.raises(
        SpecError,
        match=r"both\.checkpoints\[1\]: 'other' and 'pretrain' differ in n_layers \(5, 3\),"
        r" activation \('swiglu', 'xielu'\)\. Fix: .* of the same dimensions",
    ):
        trajectories(budget, other={**other, **budget, "model": model}, **both)


def test_the_best_step_of_a_rewrite_is_refused() -> None:
    pairs = {"kind": "rewrite", "from": "pretrain", "layer_pairs": {"start": 0, "layers": 2}}
    later = {"kind": "export", "from": "pairs@best:val_loss"}
    stage = {"global_batch_size": 4, "budget": "20 steps", "validation": {"interval": 5}}
    with pytest.raises(
        SpecError, match=r"export\.from: .* but 'pairs' is a rewrite and has one result. Fix: write 'pairs'"
    ):
        trajectories(stage, pairs=pairs, export=later)
