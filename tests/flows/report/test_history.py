"""Curves of training along a lineage, thinned for a page."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flows.planning.plan import Plan
from flows.report.history import curve, running_mean, thin, tokens_before
from tests.flows.report.report_store import add, rows_of, store, trained

Planned = Callable[..., Plan]


def test_each_segment_continues_after_the_one_before(planned: Planned) -> None:
    plan = planned()
    trained(plan)
    found = curve(planned(), "pretrain")
    assert found is not None
    per_step = [128] * 12 + [256] * 4
    assert found.columns["loss"].x == [sum(per_step[: step + 1]) for step in range(16)]


def test_a_branch_begins_at_the_tokens_of_its_parents_checkpoint(planned: Planned) -> None:
    plan = planned("stages.cooldown.from=pretrain@step=10")
    store(
        plan,
        "cooldown",
        rows=[
            *rows_of(plan, "cooldown"),
            {"step": 6, "validation": {"corpus/notes": 3.5}},
            {"step": 6, "norms": {"weights/layers.0": 2.5, "exp_avg/layers.0": float("inf")}},
        ],
    )
    found = curve(plan, "cooldown")
    assert found is not None
    assert found.columns["lr"].x == [1280 + 128 * step for step in range(1, 7)]
    norm = found.norms["weights/layers.0"]
    assert (norm.x, norm.y, found.broken) == ([1280 + 6 * 128], [2.5], 1)
    assert (found.heldout["corpus/notes"].x, found.heldout["corpus/notes"].y) == ([1280 + 6 * 128], [3.5])


def test_steps_that_count_from_zero_and_merges_continue_along_the_lineage(planned: Planned) -> None:
    plan, before = planned(), {}
    both = {"checkpoint:0": ("long-context/1", 2), "checkpoint:1": ("long-context/2", 3)}
    for name, kind, reads, steps, tokens in (
        ("long-context/1", "long_context", {"parent": ("pretrain/3", 16)}, 4, 40),
        ("long-context/2", "long_context", {"parent": ("long-context/1", 4)}, 4, 400),
        ("merge", "merge", both, 0, 0),
        ("sft", "sft", {"parent": ("merge", 0)}, 2, 20),
    ):
        add(plan, name, kind, reads, steps=steps, tokens=tokens)
        before[name] = tokens_before(plan.graph, plan.graph.nodes[name])
    merged = 2560 + 40 + 300
    assert list(before.values()) == [2560, 2560 + 40, merged, merged]
    store(plan, "sft", rows=rows_of(plan, "sft"))
    found = curve(plan, "sft")
    assert found is not None and found.columns["loss"].x == [merged + 10, merged + 20]


def test_thinning_keeps_the_ends_and_the_extremes_of_every_bucket() -> None:
    count = 100_000
    values = [2.0 + 0.001 * (index % 7) for index in range(count)]
    values[0], values[41_234], values[77_777], values[-1] = 3.0, 99.0, -5.0, 2.5
    found = thin(range(count), values, limit=2000)
    assert len(found.x) <= 2000 and found.x == sorted(found.x)
    assert {(0, 3.0), (41_234, 99.0), (77_777, -5.0), (count - 1, 2.5)} <= set(
        zip(found.x, found.y, strict=True)
    )
    assert all(values[int(x)] == pytest.approx(y) for x, y in zip(found.x, found.y, strict=True))


def test_a_short_curve_is_not_thinned() -> None:
    assert thin([1, 2, 3], [5.0, 6.0, 4.0], limit=3).y == [5.0, 6.0, 4.0]


def test_the_running_mean_is_centred_and_narrows_at_the_ends() -> None:
    assert running_mean([1.0, 2.0, 6.0, 3.0], 1) == [1.5, 3.0, 11 / 3, 4.5]
