"""Prefect's temporary server: our settings hold although Prefect was imported before, and runs start theirs in turn."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flows.server import SETTINGS

# Nothing is started: `start` says what it would wait, in a process of its own, since the settings stay.
PROGRAM = """
import fcntl
import flows.pipeline
from flows.server import start_prefect
from prefect.server.api.server import SubprocessASGIServer
from prefect.settings import get_current_settings

def start(server):
    settings = get_current_settings()
    with open(settings.home / "apertus-starts-a-server") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another would wait")
    seconds, statistics = settings.server.ephemeral.startup_timeout_seconds, settings.server.analytics_enabled
    raise RuntimeError(f"waited {seconds} s, statistics {statistics}.")

SubprocessASGIServer.start = start
try:
    start_prefect()
except ConnectionError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("chosen", "seconds"), [({}, 300), ({"PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "7"}, 7)], ids=["ours", "the user's"]
)
def test_a_server_starts_alone_with_settings_that_hold_after_prefect_was_imported(
    chosen: dict[str, str], seconds: int, tmp_path: Path
) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in SETTINGS and name != "PREFECT_API_URL"} | chosen
    environment["PREFECT_HOME"] = str(tmp_path / "new")
    ended = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert "another would wait" in ended.stdout
    assert f"waited {seconds} s, statistics False. Fix: run again" in ended.stdout
