from __future__ import annotations

import pytest

from apertus_model.data.corpora.plan import NUMBERED, Key, RoundKey, StepKey, parse


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (StepKey("records", 1, 7), "records-01-00007"),
        (StepKey("resolve", NUMBERED, 0), "resolve-copies-00000"),
        (StepKey("components", 3), "components-03"),
        (RoundKey("large", 2, 12, 5), "large-02-012-00005"),
        (Key("scatter", 123_456), "scatter-123456"),
        (Key("validation", 4), "validation-00004"),
    ],
)
def test_keys_are_stored_and_read_as_this_text(key: Key | StepKey | RoundKey, text: str) -> None:
    assert str(key) == text
    assert parse(text) == key
