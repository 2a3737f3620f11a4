"""Which kinds of personal data a source loses, and in which documents."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from specs.stages.conversations import ConversationSource
from specs.stages.corpus import CorpusSource

LANGUAGE = {"filter": "language", "model": "/lid.bin", "languages": ["de"]}
GERMAN = {"kinds": ["phone", "email"], "only": {"language": ["de"]}}


@pytest.mark.parametrize(
    ("pii", "replaced"),
    [
        (True, ("email", "ip", "iban")),
        (False, ()),
        (["phone", "email"], ("email", "phone")),
        (GERMAN, ("email", "phone")),
    ],
)
def test_kinds_of_personal_data_are_replaced_in_one_order(pii: Any, replaced: tuple[str, ...]) -> None:
    assert CorpusSource(pii=pii).replaced == ConversationSource(pii=pii).replaced == replaced


def test_the_column_that_limits_them_is_read_unless_a_filter_adds_it() -> None:
    assert CorpusSource.model_validate({"pii": GERMAN}).columns() == ["language"]
    assert CorpusSource.model_validate({"pii": GERMAN, "filters": [LANGUAGE]}).columns() == []
    assert CorpusSource(pii=True).replaced_only == {}


@pytest.mark.parametrize("missing", ["kinds", "only"])
def test_a_limit_without_kinds_or_columns_is_refused(missing: str) -> None:
    with pytest.raises(ValidationError, match="at least 1"):
        CorpusSource.model_validate({"pii": GERMAN | {missing: type(GERMAN[missing])()}})
