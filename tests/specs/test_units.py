"""Quantities: exact, with a unit, or refused with what to write instead."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter

from specs.units import Budget, Count, Duration, Reference


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [
        ("15T tokens", 15 * 10**12, "tokens"),
        ("15T", 15 * 10**12, "tokens"),
        ("7.038T tokens", 7_038_000_000_000, "tokens"),
        ("4_096_000 samples", 4_096_000, "samples"),
        ("2.6M steps", 2_600_000, "steps"),
        ("1 step", 1, "steps"),
        ("200k tokens", 200_000, "tokens"),
    ],
)
def test_a_budget_is_exact(text: str, amount: int, unit: str) -> None:
    assert Budget.parse(text) == Budget(amount, unit)  # type: ignore[arg-type]  # the parameter is one of the units
    assert Budget.parse(str(Budget.parse(text))) == Budget.parse(text)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("100", "has no unit"),
        (100, "has no unit"),
        ("3 bananas", "not a unit"),
        ("1.5 steps", "not a whole number"),
        ("-1 steps", "not an amount"),
        (True, "not an amount"),
        (["/foo"], r"\['/foo'\] is not an amount"),
        ({"a": 1}, "not an amount"),
        (1.5, "not an amount"),
        ("1" + "0" * 20 + " steps", "is more than 9223372036854775807"),
        ("lots", "not an amount"),
        ("9" * 400 + " steps", r"'9+\.\.\.9+ steps' has more than 40 characters"),
        ("20000000T tokens", r"'20000000T tokens' is more than 9223372036854775807"),
    ],
)
def test_a_wrong_budget_says_what_to_write(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Budget.parse(value)


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("30m", 1800), ("2h", 7200), ("1d", 86400)])
def test_durations(text: str, seconds: float) -> None:
    assert Duration.parse(text).seconds == seconds


def test_a_duration_without_a_unit_is_refused() -> None:
    with pytest.raises(ValueError, match="not a duration"):
        Duration.parse("90")


@pytest.mark.parametrize("text", ["9" * 400 + "s", "99999999999999999d"])
def test_a_duration_has_a_limit(text: str) -> None:
    with pytest.raises(ValueError, match="the longest duration"):
        Duration.parse(text)


@pytest.mark.parametrize("selector", ["step=", "tokens="])
def test_reference_to_an_unreachable_step_is_refused(selector: str) -> None:
    with pytest.raises(ValueError, match="more than 40 characters"):
        Reference.parse(f"pretrain@{selector}{'9' * 5000}")


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("pretrain", Reference("pretrain")),
        ("corpus/code", Reference("corpus", part="code")),
        ("pretrain@step=1200", Reference("pretrain", step=1200)),
        ("pretrain@tokens=7.0T", Reference("pretrain", tokens=7 * 10**12)),
        ("pretrain@last", Reference("pretrain")),
    ],
)
def test_references(text: str, reference: Reference) -> None:
    assert Reference.parse(text) == reference


@pytest.mark.parametrize("text", ["", "a b", "pretrain@", "pretrain@step", "pretrain@step=x", "../x"])
def test_malformed_reference_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a reference") as caught:
        Reference.parse(text)
    examples = "'corpus/code', 'pretrain@step=1200', 'pretrain@tokens=7.0T', 'sft@best:val_loss'"
    assert examples in str(caught.value)


@pytest.mark.parametrize(("stated", "number"), [("20k", 20_000), ("1.5M", 1_500_000), (7, 7), ("12", 12)])
def test_a_count_is_a_whole_number(stated: int | str, number: int) -> None:
    assert TypeAdapter(Count).validate_python(stated) == number


@pytest.mark.parametrize(
    ("stated", "message"), [("20k tokens", "has a unit"), ("0.5", "not a whole number"), ("many", "not an")]
)
def test_what_is_no_count_is_refused(stated: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TypeAdapter(Count).validate_python(stated)
