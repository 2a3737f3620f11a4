from __future__ import annotations

import pytest

from apertus_model.failure import failure_of
from infra.store import StoreError
from infra.store.records import DamagedCheckpoint
from specs.errors import StageError


@pytest.mark.parametrize(
    ("error", "message", "again"),
    [
        (StageError("no column 'text'"), "no column 'text'", False),
        (StoreError("the store is gone"), "StoreError: the store is gone", True),
        (OSError("disk"), "OSError: disk", True),
        (KeyError("x"), "KeyError: 'x'", False),
        (NotImplementedError("y"), "NotImplementedError: y", False),
    ],
)
def test_errors_of_machines_are_worth_another_try_and_those_of_recipes_are_not(
    error: Exception, message: str, again: bool
) -> None:
    failure = failure_of(error)
    assert (failure.message, failure.again, failure.damaged) == (message, again, None)


def test_a_damaged_checkpoint_is_named() -> None:
    error = DamagedCheckpoint("damaged", "pretrain/f", 7)
    damaged = failure_of(error).damaged
    assert damaged is not None and (damaged.artifact, damaged.step) == ("pretrain/f", 7)


def test_a_secret_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORE_TOKEN", "planted-7f3a")
    assert "planted-7f3a" not in failure_of(OSError("401 for planted-7f3a")).message
