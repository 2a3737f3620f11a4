"""Why a part runs again: the field with both values, or the input that changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flows.planning.plan import Plan
from tests.flows.conftest import finish

Planned = Callable[..., Plan]


def to_do(plan: Plan) -> list[str]:
    return [name for name, step in plan.steps.items() if step.action != "reuse"]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("stages.export.tolerance=1e-3", ["export"]),
        ("stages.evaluate.samples=5", ["evaluate"]),
        ("stages.cooldown.optimizer.lr=2e-4", ["cooldown", "evaluate", "export"]),
        ("stages.cooldown.schedule.final=0.0", ["cooldown", "evaluate", "export"]),
        ("stages.second.seed=7", ["second", "pretrain/2", "pretrain/3", "cooldown", "evaluate", "export"]),
        ("stages.pretrain.global_batch_size.12 steps=16", ["pretrain/3", "cooldown", "evaluate", "export"]),
        (
            "stages.pretrain.optimizer.weight_decay=0.2",
            ["pretrain/1", "pretrain/2", "pretrain/3", "cooldown", "evaluate", "export"],
        ),
    ],
)
def test_edit_reruns_only_changed_and_later_stages(
    planned: Planned, override: str, expected: list[str]
) -> None:
    finish(planned())
    plan = planned(override)
    assert to_do(plan) == expected
    field, _, value = override.rpartition("=")
    name = field.split(".")[2]
    assert name in plan.steps[expected[0]].reason or name == "global_batch_size"
    assert (
        f"-> {float(value):g}" in plan.steps[expected[0]].reason
        or f"-> {value}" in plan.steps[expected[0]].reason
    )


def test_the_reason_names_field_old_value_and_new_value(planned: Planned) -> None:
    finish(planned())
    plan = planned("stages.cooldown.optimizer.lr=2e-4")
    assert plan.steps["cooldown"].reason == "optimizer.lr: 0.01 -> 0.0002"
    assert plan.steps["export"].reason.startswith("cooldown changed")
