"""Where Swift cannot run, the tests on it are skipped with the reason; where it runs, it can be stopped."""

from __future__ import annotations

import errno
import os
import pwd
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.infra.swift import Swift, obstacle


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


def test_it_stops_while_another_process_holds_its_input_open(tmp_path: Path) -> None:
    if reason := obstacle(tmp_path):
        pytest.skip(reason)
    swift = Swift(tmp_path)
    swift.start()
    process = swift._process
    assert process is not None and process.stdin is not None
    with subprocess.Popen(["sleep", "60"], pass_fds=[process.stdin.fileno()]) as holder:
        swift.stop()
        assert holder.poll() is None and process.returncode == 0
        holder.kill()
