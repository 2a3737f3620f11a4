from __future__ import annotations

import pytest

from apertus_model.data.corpora.plan import NUMBERED, Key, parse


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (Key("records", 7, 1), "records-01-00007"),
        (Key("resolve", 0, NUMBERED), "resolve-copies-00000"),
        (Key("components", step=3), "components-03"),
        (Key("small", 0, 2, 0), "small-02-000-00000"),
        (Key("large", 5, 2, 12), "large-02-012-00005"),
        (Key("scatter", 123_456), "scatter-123456"),
        (Key("validation", 4), "validation-00004"),
    ],
)
def test_keys_are_stored_and_read_as_this_text(key: Key, text: str) -> None:
    assert str(key) == text
    assert parse(text) == key
