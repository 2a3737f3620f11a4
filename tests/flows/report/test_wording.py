"""Values of a report as people read them."""

from __future__ import annotations

import pytest

from flows.report.wording import duration, elided, shown, signed


def test_long_name_keeps_its_end() -> None:
    assert elided("evaluate-aligned-qrpo", 20) == "evaluate-…igned-qrpo"
    assert elided("evaluate-aligned-dpo", 20) == "evaluate-aligned-dpo"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(45.21, "45.2 s"), (200, "3 min 20 s"), (18_720, "5 h 12 min"), (273_600, "3 d 4 h")],
)
def test_durations_are_in_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_difference_has_a_sign() -> None:
    assert [signed(value) for value in (0.0123456, -2.0, None)] == ["+0.01235", "-2", "–"]


def test_shown_values_are_short() -> None:
    assert [shown(value) for value in (True, None, 12_345, 0.123456, {"length": 3}, [1, 2], {})] == [
        "yes", "–", "12,345", "0.12346", "length 3", "1, 2", "–",
    ]  # fmt: skip
