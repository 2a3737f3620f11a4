"""Artifacts are found by a name or a beginning of their fingerprint."""

from __future__ import annotations

import pytest

from flows.provenance.lookup import find
from infra.store import Store, StoreError


def test_a_name_that_fits_several_artifacts_is_refused_with_all_of_them(store: Store) -> None:
    for kind, fingerprint in (("corpus", "a" * 32), ("corpus", "a" * 31 + "b"), ("export", "a" * 32)):
        store.write_once(f"{kind}/{fingerprint}/identity.json", b"{}")
    with pytest.raises(
        StoreError, match=f"fits corpus/{'a' * 32}, corpus/{'a' * 31}b, export/{'a' * 32}; write more digits"
    ):
        find(store, "aaaaaa")
    (artifact,) = find(store, "export/aaaaaa")
    assert (artifact.path, artifact.step) == (f"export/{'a' * 32}", None)
