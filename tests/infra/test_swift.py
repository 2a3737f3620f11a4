"""Where Swift cannot run, the tests on it are skipped with the reason."""

from __future__ import annotations

import errno
import os
import pwd
from pathlib import Path
from typing import Any

import pytest

from tests.infra.swift import obstacle


def test_a_user_without_a_name_runs_no_swift(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert obstacle(tmp_path) == ""

    def unknown(user: int) -> Any:
        raise KeyError(f"uid not found: {user}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert obstacle(tmp_path) == f"Swift is run by a user with a name, and user {os.getuid()} has none"


def test_swift_wants_extended_attributes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(os, "setxattr", refuse)
    reason = "Operation not supported): set TMPDIR"
    assert obstacle(tmp_path) == f"Swift keeps extended attributes, which {tmp_path} cannot have ({reason}"
