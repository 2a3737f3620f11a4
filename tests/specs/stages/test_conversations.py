"""How a source of conversations is processed, and what changes its fingerprint."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from specs.stages.conversations import ConversationSource


def test_steps_that_are_not_taken_are_in_no_fingerprint() -> None:
    assert ConversationSource().identity_fields() == {"holdout": 0.02}
    stated = ConversationSource.model_validate({"count": "20k", "pii": True})
    assert stated.identity_fields() == {"holdout": 0.02, "count": 20_000, "pii": True}
    assert stated.replaced == ("email", "ip", "iban")


def test_names_of_other_parts_are_in_no_fingerprint() -> None:
    def fields(*names: str) -> dict[str, Any]:
        step = {"filter": "exact-duplicates", "not_in": list(names)}
        return ConversationSource.model_validate({"filters": [step]}).identity_fields()

    assert fields("chat/a") == fields("talks/a")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"share": 0.5, "count": 10}, "share and count both say"),
        ({"share": 0}, "greater than 0"),
        ({"share": 1.5}, "less than or equal to 1"),
        ({"count": 0}, "greater than or equal to 1"),
        ({"count": "20k tokens"}, "has a unit"),
        ({"filters": [{"filter": "length", "of": "question"}]}, "'conversation' or 'answer'"),
    ],
)
def test_what_cannot_be_meant_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ConversationSource.model_validate(fields)
