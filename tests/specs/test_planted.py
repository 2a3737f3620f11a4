"""Planted documents: how canaries are written, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from specs.planted import Canaries, Planted, planted_in

CODE = {"template": "The code of safe {number} is {secret}.", "length": 3, "count": 4}


def test_a_canary_is_its_template_with_its_number_and_its_secret() -> None:
    canaries = Canaries.model_validate(CODE)
    assert canaries.space == 1000
    assert [canaries.secret(index) for index in (0, 42, 999)] == ["000", "042", "999"]
    assert canaries.text(2, "042") == "The code of safe 2 is 042."
    assert canaries.longest == len("The code of safe 4 is 042.")
    letters = Canaries(template="{number}: {secret}", alphabet="äbc", length=2, count=9)
    assert [letters.secret(index) for index in range(4)] == ["ää", "äb", "äc", "bä"]
    assert letters.text(1, "{number}") == "1: {number}"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"template": "The code is known."}, r"the template has 0 slots \{secret\}; set one"),
        ({"template": "{secret} and {secret}"}, "the template has 2 slots"),
        ({"template": "{secret} of {name}"}, r"a slot \{name\}; use \{secret\} and \{number\}"),
        ({"count": 1001}, "1001 different secrets are asked for, and 10 characters give 1000 of length 3"),
        ({"length": 15}, r"more than 2\*\*48 secrets of length 15; lower length"),
        ({"alphabet": "abca"}, "the alphabet 'abca' has a character twice"),
        ({"alphabet": "a"}, "at least 2 characters"),
        ({"length": 0}, "greater than or equal to 1"),
    ],
)
def test_a_generator_that_cannot_make_its_documents_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Canaries.model_validate(CODE | fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"canaries": CODE, "buckets": [0, -1]}, "greater than or equal to 0"),
        ({"canaries": CODE, "buckets": [0, 8, 8]}, "8 is repeated; list it once"),
        ({"canaries": CODE, "buckets": []}, "at least 1 item"),
        ({"canaries": CODE, "buckets": [0, 1, 2, 4, 8]}, "4 documents cannot be divided among 5 buckets"),
        (
            {"canaries": CODE, "documents": "notes", "buckets": [1]},
            "set either documents or canaries",
        ),
        ({"buckets": [1]}, "set either documents or canaries"),
    ],
)
def test_numbers_of_copies_without_sense_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Planted.model_validate(fields)


def test_a_record_says_what_is_planted_before_and_after_it_was_made() -> None:
    planted = Planted.model_validate({"canaries": CODE, "buckets": [0, 8]})
    spec = {"process": {"planted": {"codes": planted.identity_fields()}}}
    (before,) = planted_in(spec, {})
    assert before.line == "codes: canaries (0, 8 of each)"
    made = {"codes": {"documents": 4, "copies": 16, "tokens": 1600, "digest": "ab"}}
    (after,) = planted_in(spec, {"planted": made})
    assert after.line == "codes: 4 canaries, 16 copies (0, 8 of each), 1,600 tokens"
    assert planted_in({"process": {}}, {}) == planted_in({}, {}) == []
