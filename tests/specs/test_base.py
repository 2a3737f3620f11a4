"""Identity and fingerprints: what enters them, what does not, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from specs.base import Spec, canonical_json, encode, execution, fingerprint, flatten, identity
from specs.units import Budget


class Example(Spec):
    lr: float = identity()
    clip: float | None = identity(None, neutral=None)
    processes: int = execution(1)


def test_execution_fields_do_not_enter_the_identity() -> None:
    assert (
        Example(lr=0.1, processes=1).identity_fields()
        == Example(lr=0.1, processes=8).identity_fields()
        == {"lr": 0.1}
    )


def test_a_field_at_its_neutral_value_is_left_out_so_a_new_option_invalidates_nothing() -> None:
    class Older(Spec):
        lr: float = identity()

    older, newer = Older(lr=0.1).identity_fields(), Example(lr=0.1).identity_fields()
    assert fingerprint("x", 1, older, {}) == fingerprint("x", 1, newer, {})
    assert Example(lr=0.1, clip=1.0).identity_fields() == {"lr": 0.1, "clip": 1.0}


def test_a_field_without_a_role_is_refused_when_the_class_is_made() -> None:
    with pytest.raises(TypeError, match=r"Nameless\.width declares no role"):

        class Nameless(Spec):
            width: int = Field(1)


@pytest.mark.parametrize("value", [Path("/tmp"), {1, 2}, object(), b"bytes", {1: "int key"}])
def test_encoder_refuses_values_without_a_stable_form(value: object) -> None:
    with pytest.raises(TypeError, match="fingerprint"):
        encode(value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_encoder_refuses_nan_and_infinity(value: float) -> None:
    with pytest.raises(ValueError, match="fingerprint"):
        encode(value)


def test_a_fingerprint_is_the_documented_hash() -> None:
    import hashlib

    text = '{"format":1,"inputs":{"a":"00"},"kind":"mixture","spec":{"seed":28,"weights":[0.5]},"version":1}'
    expected = hashlib.sha256(text.encode()).hexdigest()[:32]
    assert fingerprint("mixture", 1, {"weights": [0.5], "seed": 28}, {"a": "00"}) == expected


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), JSON))
def test_the_order_of_keys_does_not_matter(fields: dict[str, object]) -> None:
    assert canonical_json(fields) == canonical_json(dict(reversed(list(fields.items()))))


@given(JSON, JSON)
def test_different_values_have_different_encodings(left: object, right: object) -> None:
    if canonical_json(encode(left)) == canonical_json(encode(right)):
        assert left == right


def test_flatten_names_every_leaf() -> None:
    assert flatten({"a": {"b": [1, {"c": 2}]}, "d": None}) == {"a.b[0]": 1, "a.b[1].c": 2, "d": None}


def test_budgets_have_a_stable_form() -> None:
    assert encode(Budget.parse("15T tokens")) == "15000000000000 tokens"
