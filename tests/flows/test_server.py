"""Prefect's temporary server: our settings hold although Prefect was imported before, and one that does not start is a message."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from flows.server import SETTINGS

# Nothing is started: `start` says what it would wait, in a process of its own, since the settings stay.
PROGRAM = """
import flows.pipeline
from flows.server import start_prefect
from prefect.server.api.server import SubprocessASGIServer
from prefect.settings import get_current_settings

def start(server):
    server = get_current_settings().server
    raise RuntimeError(f"waited {server.ephemeral.startup_timeout_seconds} s, analytics {server.analytics_enabled}.")

SubprocessASGIServer.start = start
try:
    start_prefect()
except ConnectionError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("chosen", "seconds"), [({}, 300), ({"PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "7"}, 7)], ids=["ours", "the user's"]
)
def test_settings_reach_a_prefect_that_was_imported_before(chosen: dict[str, str], seconds: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in SETTINGS and name != "PREFECT_API_URL"} | chosen
    ended = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert f"waited {seconds} s, analytics False. Fix: run again" in ended.stdout
