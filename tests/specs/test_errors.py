"""What errors of a spec say: suggestions, and no secret."""

from __future__ import annotations

import traceback

import pytest

from infra.store import StoreError
from infra.store.storage.retry import StorageError
from specs.errors import StageError, did_you_mean


def test_suggestions_name_each_candidate_once() -> None:
    assert did_you_mean("x", ["main", "corpus", "main"]) == "use one of corpus, main."


@pytest.mark.parametrize("kind", [StageError, StoreError, StorageError])
def test_our_errors_mask_secrets_in_messages_that_they_repeat(kind: type[Exception]) -> None:
    error = kind("the storage failed: cannot open s3://me:hunter/2@bucket")
    assert str(error) == "the storage failed: cannot open s3://***@bucket"
    assert "hunter" not in "".join(traceback.format_exception(error))
