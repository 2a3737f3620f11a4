"""What training asks of its sources, and whether they have it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flows.planning.plan import Plan
from specs.errors import SpecError
from tests.flows.conftest import finish
from tests.flows.planning.mixing import SECOND

Planned = Callable[..., Plan]


def test_passes_count_from_new_weights_and_the_needed_factor_is_named(mixed: Planned) -> None:
    finish(mixed())
    windows = 39_999 // 32
    usages = {
        (usage.stage, usage.source): usage for usage in mixed("stages.cooldown.budget=100 steps").source_usage
    }
    notes = usages["cooldown", "corpus/notes"]
    # main: 32 samples in pretrain, 800 in the cooldown, 60% notes; second: 48 samples, 42%.
    assert notes.passes == pytest.approx((832 * 0.6 + 48 * 0.42) / windows)
    assert notes.tokens == pytest.approx(800 * 0.6 * 32)
    assert (notes.available, notes.exact, notes.sequences, notes.allowed, notes.shortfall) == (
        40_000,
        True,
        windows,
        100,
        0,
    )
    with pytest.raises(SpecError) as caught:
        mixed("stages.cooldown.budget=100 steps", "stages.main.max_repetition=0.4")
    passes = (832 * 0.6 + 48 * 0.42) / windows
    assert (
        f"from 'corpus/notes' through mixture 'main', which holds 40,000 training tokens ({windows:,}"
        " sequences of 32)" in str(caught.value)
    )
    assert f"{passes / 0.4:.2f} times as much" in str(caught.value)
    assert "raise max_repetition to 0.5" in str(caught.value)


def test_common_ancestors_of_merged_checkpoints_count_once(mixed: Planned) -> None:
    merged = SECOND + "  average: {kind: merge, checkpoints: [pretrain@step=6, pretrain@step=8]}\n"
    overrides = [
        "stages.cooldown.from=average",
        "stages.cooldown.carry=[weights]",
        "stages.cooldown.optimizer.lr=1e-3",
    ]
    finish(mixed(*overrides, second=merged))
    again = mixed(*overrides, second=merged)
    notes = next(
        usage for usage in again.source_usage if (usage.stage, usage.source) == ("cooldown", "corpus/notes")
    )
    assert notes.passes == pytest.approx((32 + 24) * 0.6 / (39_999 // 32))


def test_consumed_tokens_of_the_only_source_equal_trained_tokens(planned: Planned) -> None:
    plan = planned()
    trained = {name: sum(node.tokens for node in plan.graph.of(name)) for name in ("pretrain", "cooldown")}
    assert {usage.stage: (usage.tokens, usage.consumed) for usage in plan.source_usage} == {
        "pretrain": (trained["pretrain"], trained["pretrain"]),
        "cooldown": (trained["cooldown"], trained["pretrain"] + trained["cooldown"]),
    }


def test_a_mixture_that_asks_for_more_than_its_sources_can_hold_is_refused(planned: Planned) -> None:
    with pytest.raises(SpecError) as caught:
        planned("stages.main.max_repetition=4", "stages.pretrain.budget=300k steps")
    text = str(caught.value)
    assert "tiny.yaml:" in text or "--set" in text
    assert "draws" in text
    assert "'corpus/notes' through mixture 'second', which can hold at most" in text
    assert "4 are allowed" in text or "100 are allowed" in text


def test_a_built_corpus_is_counted_exactly(planned: Planned) -> None:
    finish(planned(), "tokenizer", "corpus/notes")
    windows = (40_000 - 1) // 32
    fits = "stages.pretrain.mixture={0 steps: main}"
    # pretrain of batch 4, then the cooldown's 6 steps of 4 draw from the same mixture
    allowed = (windows - 6 * 8) // 4
    planned(
        fits,
        "stages.main.max_repetition=1",
        "stages.pretrain.global_batch_size=4",
        f"stages.pretrain.budget={allowed} steps",
    )
    with pytest.raises(
        SpecError, match=f"which holds 40,000 training tokens \\({windows:,} sequences of 32\\)"
    ):
        planned(
            fits,
            "stages.main.max_repetition=1",
            "stages.pretrain.global_batch_size=4",
            f"stages.pretrain.budget={windows} steps",
        )
