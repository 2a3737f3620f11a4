"""Settings that training stages share."""

from __future__ import annotations

from specs.settings import Goldfish


def test_windows_inside_documents_are_an_option_that_changes_no_fingerprint_until_it_is_taken() -> None:
    assert Goldfish().identity_fields() == {"k": 50, "h": 50}
    assert Goldfish(within_documents=True).identity_fields()["within_documents"] is True
