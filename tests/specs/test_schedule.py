"""Learning rates against the closed forms, for the published 8B and 70B schedules and at the borders."""

from __future__ import annotations

import math

import pytest

from specs.schedule import Schedule

SEQUENCE = 4096
TOTAL, DECAY, WARMUP = 3_662_109_375 * SEQUENCE, 403_905_806 * SEQUENCE, 4_096_000 * SEQUENCE


@pytest.mark.parametrize("peak", [1.1e-4, 1.0e-5])
def test_the_published_schedules(peak: float) -> None:
    start = TOTAL - DECAY
    schedule = Schedule(peak=peak, warmup_tokens=WARMUP, decay="1-sqrt", decay_start=start, decay_tokens=DECAY, final=0.1)
    assert schedule.lr(0) == 0.0
    assert schedule.lr(WARMUP // 2) == pytest.approx(peak / 2, rel=1e-12)
    assert schedule.lr(WARMUP) == schedule.lr(start) == peak
    for share in (0.01, 0.25, 0.5, 1.0):
        tokens = start + int(share * DECAY)
        expected = 0.1 * peak + 0.9 * peak * (1 - math.sqrt((tokens - start) / DECAY))
        assert schedule.lr(tokens) == pytest.approx(expected, rel=1e-12)
    assert schedule.lr(TOTAL) == pytest.approx(peak / 10, rel=1e-12)
    assert start / 1e12 == pytest.approx(13.346, abs=1e-3)  # where the report's decay begins


@pytest.mark.parametrize(("decay", "middle"), [("linear", 0.5), ("cosine", 0.5), ("1-sqrt", 1 - math.sqrt(0.5))])
def test_shapes_of_the_decay_to_zero(decay: str, middle: float) -> None:
    schedule = Schedule.model_validate({"peak": 1.0, "decay": decay, "decay_start": 100, "decay_tokens": 100, "final": 0.0})
    assert [schedule.lr(50), schedule.lr(100), schedule.lr(200), schedule.lr(300)] == pytest.approx([1.0, 1.0, 0.0, 0.0], abs=1e-15)
    assert schedule.lr(150) == pytest.approx(middle)


def test_warmup_begins_at_the_stated_fraction() -> None:
    schedule = Schedule(peak=2.0, warmup_tokens=100, warmup_from=0.1)
    assert [schedule.lr(0), schedule.lr(50), schedule.lr(100)] == pytest.approx([0.2, 1.1, 2.0])
