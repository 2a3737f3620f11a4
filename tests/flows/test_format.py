"""Numbers for people."""

from __future__ import annotations

import pytest

from flows.format import amount, energy, flop, headline, in_full, quantity, size


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (25_120, "25,120"),
        (3, "3"),
        (4.2863, "4.286"),
        (9999.4, "9,999"),
        (31_415.9, "31,416"),
        (3.338e-06, "3.338e-06"),
    ],
)
def test_numbers_are_written_in_full(value: float, text: str) -> None:
    assert in_full(value) == text


def test_counts_in_a_headline_are_whole_and_a_sum_of_nothing_is_zero() -> None:
    assert headline({"conversations": 25_120, "loss": 2.17654}) == "loss 2.177, conversations 25,120"
    assert (quantity(0), quantity(25_120)) == ("0", "25.1k")


def test_a_headline_has_what_was_rejected_and_why_and_what_was_set_aside() -> None:
    rejected = {"empty": 1_200, "not_json": 0, "not_utf8": 34}
    text = "documents 5, 1,234 rejected (1,200 empty, 34 not_utf8)"
    assert headline({"documents": 5, "rejected": rejected}) == text
    assert headline({"vocab_size": 5, "set_aside": ["truncation", "dropout"]}) == (
        "vocab size 5, truncation and dropout set aside"
    )
    assert (
        headline({"documents": 5, "rejected": {"empty": 0}, "set_aside": []})
        == headline({"documents": 5})
        == "documents 5"
    )


def test_numbers_are_those_of_the_next_magnitude_when_they_round_to_it() -> None:
    assert [amount(value) for value in (999.9e6, 999.4e6, 1e9, 0)] == ["1B", "999M", "1B", "-"]
    assert size(999.9e9) == "1 TB" and energy(999.9) == "1 MWh"
    assert [flop(value) for value in (6.744e24, 1e12, 0)] == ["6.74e24", "1e12", "-"]
