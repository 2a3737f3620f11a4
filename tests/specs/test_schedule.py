"""Learning rates against the closed forms, for the published 8B and 70B schedules and at the borders."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import mpmath
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specs.schedule import Schedule
from tests.numerics import Numerics

mpmath.mp.dps = 50

SEQUENCE = 4096
TOTAL, DECAY, WARMUP = 3_662_109_375 * SEQUENCE, 403_905_806 * SEQUENCE, 4_096_000 * SEQUENCE


@pytest.mark.parametrize("peak", [1.1e-4, 1.0e-5])
def test_the_published_schedules(peak: float, numerics: Numerics) -> None:
    start = TOTAL - DECAY
    worst = 0.0
    schedule = Schedule(
        warmup_tokens=WARMUP, decay="1-sqrt", decay_start=start, decay_tokens=DECAY, final=0.1
    )
    assert peak * schedule.factor(0) == 0.0
    assert peak * schedule.factor(WARMUP // 2) == pytest.approx(peak / 2, rel=1e-12)
    assert peak * schedule.factor(WARMUP) == peak * schedule.factor(start) == peak
    for share in (0.01, 0.25, 0.5, 1.0):
        tokens = start + int(share * DECAY)
        expected = 0.1 * peak + 0.9 * peak * (1 - mpmath.sqrt(mpmath.mpf(tokens - start) / DECAY))
        worst = max(worst, float(abs(peak * schedule.factor(tokens) / expected - 1)))
    numerics(
        "schedules",
        "learning rate of the 8B and 70B runs, relative",
        source="lr_min + (lr_max - lr_min)(1 - sqrt((s - s0) / D)); released scripts",
        against="the formula in 50 digits, at the borders and inside",
        difference=worst,
        allowed=1e-14,
    )
    assert peak * schedule.factor(TOTAL) == pytest.approx(peak / 10, rel=1e-12)
    assert start / 1e12 == pytest.approx(13.346, abs=1e-3)  # where the report's decay begins


@pytest.mark.parametrize(
    ("decay", "middle"), [("linear", 0.5), ("cosine", 0.5), ("1-sqrt", 1 - math.sqrt(0.5))]
)
def test_decay_to_zero_has_the_published_shapes(decay: str, middle: float) -> None:
    schedule = Schedule.model_validate(
        {"decay": decay, "decay_start": 100, "decay_tokens": 100, "final": 0.0}
    )
    assert [
        schedule.factor(50),
        schedule.factor(100),
        schedule.factor(200),
        schedule.factor(300),
    ] == pytest.approx([1.0, 1.0, 0.0, 0.0], abs=1e-15)
    assert schedule.factor(150) == pytest.approx(middle)


def test_warmup_begins_at_the_stated_fraction() -> None:
    schedule = Schedule(warmup_tokens=100, warmup_from=0.1)
    assert [2.0 * schedule.factor(tokens) for tokens in (0, 50, 100)] == pytest.approx([0.2, 1.1, 2.0])


@given(
    decay=st.sampled_from(["1-sqrt", "linear", "cosine"]),
    peak=st.floats(1e-8, 1.0),
    final=st.floats(0.0, 1.0),
    start=st.integers(0, 10**13),
    length=st.integers(1, 10**13),
    shares=st.lists(st.integers(0, 1000), min_size=2, max_size=8),
)
def test_a_decay_falls_from_the_peak_to_its_final_fraction(
    decay: str, peak: float, final: float, start: int, length: int, shares: list[int]
) -> None:
    schedule = Schedule.model_validate(
        {"decay": decay, "decay_start": start, "decay_tokens": length, "final": final}
    )
    assert peak * schedule.factor(start) == peak
    assert (
        peak * schedule.factor(start + length)
        == peak * schedule.factor(start + 2 * length)
        == pytest.approx(final * peak, rel=1e-12, abs=1e-18)
    )
    rates = [peak * schedule.factor(start + length * share // 1000) for share in sorted(shares)]
    assert all(later <= earlier * (1 + 1e-15) for earlier, later in itertools.pairwise(rates))


@given(share=st.fractions(0, 1), final=st.floats(0.0, 1.0))
def test_decays_follow_their_closed_forms(numerics: Numerics, share: Fraction, final: float) -> None:
    length = 10**12
    tokens = int(share * length)
    done = mpmath.mpf(tokens) / length
    forms = {
        "1-sqrt": 1 - mpmath.sqrt(done),
        "linear": 1 - done,
        "cosine": (1 + mpmath.cos(mpmath.pi * done)) / 2,
    }
    for decay, form in forms.items():
        schedule = Schedule.model_validate({"decay": decay, "decay_tokens": length, "final": final})
        numerics(
            "schedules",
            f"{decay} decay to any fraction, of a peak of 1",
            source="arXiv 2405.18392 for 1-sqrt and linear; half a cosine",
            against="the closed form in 50 digits, hypothesis over share and fraction",
            difference=float(abs(schedule.factor(tokens) - (final + (1 - final) * form))),
            allowed=1e-15,
        )
