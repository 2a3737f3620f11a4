"""Samples that were drawn before are not drawn again, across pieces, segments and stages."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flows.planning.plan import Plan
from specs.errors import SpecError
from tests.flows.planning.mixing import SECOND, excluded_by, segments_of, shares_of

Planned = Callable[..., Plan]


def test_pieces_of_an_annealed_mixture_exclude_earlier_ones(mixed: Planned) -> None:
    main = (
        "  main: {kind: mixture, weights: {corpus/notes: 1}, max_repetition: 100, "
        "anneal: {to: {corpus/pages: 1}, over: 6 steps, pieces: 3}}\n"
    )
    plan = mixed(
        main=main, second="  second: {kind: mixture, weights: {corpus/sums: 1}, max_repetition: 100}\n"
    )
    assert [(name, part.start_step, part.end_step) for name, part in segments_of(plan).items()] == [
        *[("pretrain/1", 0, 2), ("pretrain/2", 2, 4), ("pretrain/3", 4, 6), ("pretrain/4", 6, 8)],
        *[
            ("pretrain/5", 8, 12),
            ("pretrain/6", 12, 16),
            ("cooldown/1", 0, 2),
            ("cooldown/2", 2, 4),
            ("cooldown/3", 4, 6),
        ],
    ]
    pages = [shares_of(plan, f"main/{piece}").get("corpus/pages", 0.0) for piece in (1, 2, 3, 4)]
    assert pages == pytest.approx([1 / 6, 1 / 2, 5 / 6, 1.0])
    assert excluded_by(plan, "pretrain/3") == {"main/1": 8, "main/2": 8}
    assert excluded_by(plan, "pretrain/5") == {}
    # The cooldown goes on in the same mixture: its own piece by the counter, the others by exclusion.
    assert segments_of(plan)["cooldown/1"].sample_offset == 8
    assert excluded_by(plan, "cooldown/1") == {"main/2": 8, "main/3": 8, "main/4": 8}


def test_exclusion_holds_across_segments_and_later_stages(mixed: Planned) -> None:
    second = SECOND.replace("max_repetition", "exclude: [pretrain], max_repetition")
    plan = mixed(second=second)
    # pretrain: 8 steps of 4 of main, then 4 of 4 and 4 of 8 of second; the cooldown draws main, which
    # excludes nothing.
    assert [excluded_by(plan, name) for name in ("pretrain/1", "pretrain/2", "pretrain/3", "cooldown")] == [
        {},
        {"main": 32},
        {"main": 32},
        {},
    ]
    plan = mixed("stages.cooldown.mixture=second", "stages.cooldown.carry=[weights]", second=second)
    assert excluded_by(plan, "cooldown") == {"main": 32}
    assert segments_of(plan)["cooldown"].sample_offset == 4 * 4 + 4 * 8
    plan = mixed("stages.cooldown.mixture=second", "stages.cooldown.from=pretrain@step=10", second=second)
    assert (excluded_by(plan, "cooldown"), segments_of(plan)["cooldown"].sample_offset) == ({"main": 32}, 8)
    plain = mixed("stages.cooldown.mixture=second", "stages.cooldown.carry=[weights]")
    assert (excluded_by(plain, "cooldown"), segments_of(plain)["cooldown"].sample_offset) == ({}, 0)


def test_exclusion_that_cannot_be_exact_is_refused(mixed: Planned) -> None:
    second = SECOND.replace("max_repetition", "exclude: [pretrain], max_repetition")
    with pytest.raises(
        SpecError,
        match=(
            r"second\.seed: .* seed 3 and excludes samples of 'pretrain' from 'corpus/.*' through 'main' of"
            r" seed 28"
        ),
    ):
        mixed("stages.second.seed=3", second=second)
    with pytest.raises(
        SpecError, match=r"in sequences of 32 \(concatenate\); here sequences have 64 \(concatenate\)"
    ):
        mixed("stages.cooldown.mixture=second", "stages.cooldown.sequence_length=64", second=second)
    with pytest.raises(
        SpecError, match=r"in sequences of 32 \(concatenate\); here sequences have 32 \(best-fit\)"
    ):
        mixed("stages.cooldown.mixture=second", "stages.cooldown.packing=best-fit", second=second)


def test_samples_drawn_before_are_not_drawn_again(planned: Planned) -> None:
    plan = planned()
    offsets = {
        name: node.part.sample_offset for name, node in plan.graph.nodes.items() if node.end_step is not None
    }  # type: ignore[attr-defined]
    # main: 8 steps of 4; second: 4 steps of 4, then its counter goes on; the cooldown goes on in main where
    # pretrain/1 stopped.
    assert offsets == {"pretrain/1": 0, "pretrain/2": 0, "pretrain/3": 16, "cooldown": 32}
    fresh = planned("stages.cooldown.carry=[weights, optimizer]")
    assert fresh.graph.nodes["cooldown"].part.sample_offset == 0  # type: ignore[attr-defined]  # a segment
