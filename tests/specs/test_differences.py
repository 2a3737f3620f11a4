"""What differs between two sides: every difference once, in the order of the first side."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specs.differences import Change, changes

SIDES = st.dictionaries(st.sampled_from("abcdef"), st.none() | st.integers(0, 2))


@given(SIDES, SIDES)
def test_applying_the_changes_to_one_side_gives_the_other(
    a: dict[str, int | None], b: dict[str, int | None]
) -> None:
    found = {change.name: change for change in changes(a, b)}
    patched = {name: found[name].b if name in found else a.get(name) for name in {**a, **b}}
    assert patched == {name: b.get(name) for name in {**a, **b}}
    assert list(found) == [name for name in {**a, **b} if name in found]
    assert all(change.a != change.b for change in found.values())


@given(SIDES, SIDES)
def test_a_change_says_which_side_lacks_the_name(a: dict[str, int | None], b: dict[str, int | None]) -> None:
    for change in changes(a, b):
        assert ((change.name in a), (change.name in b)) == (change.only_in != "b", change.only_in != "a")


def test_none_equals_a_missing_name_unless_the_other_side_has_a_value() -> None:
    assert changes({"lora": None}, {}) == []
    assert changes({"lora": None}, {"lora": 16}) == [Change("lora", None, 16)]
    assert changes({}, {"lora": 16}) == [Change("lora", None, 16, "b")]
