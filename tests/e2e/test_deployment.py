"""A real Prefect server and worker: deploy, run, cancel in the middle, run again to the end."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.store import Artifact, Store
from tests.e2e.conftest import ROOT, SMOKE
from tests.e2e.test_smoke import plan_of

pytestmark = pytest.mark.slow
LONGER = "stages.cooldown.budget=1500 steps"


class Prefect:
    """A server on the loopback address, and commands against it."""

    def __init__(self, home: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.api = f"http://127.0.0.1:{self.port}/api"
        self.environment = os.environ | {
            "PREFECT_HOME": str(home / "prefect-server"),
            "PREFECT_API_URL": self.api,
            "DO_NOT_TRACK": "1",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PWD": str(ROOT),
        }
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "prefect", *arguments]
        quiet = subprocess.DEVNULL
        self.running.append(subprocess.Popen(command, cwd=ROOT, env=self.environment, stdout=quiet, stderr=quiet, start_new_session=True))

    def command(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "prefect", *arguments]
        done = subprocess.run(command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def request(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.api}/{path}", data=data, headers={"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)

    def run(self, **parameters: Any) -> str:
        deployment = self.request("deployments/name/apertus/mini")["id"]
        return str(self.request(f"deployments/{deployment}/create_flow_run", {"parameters": parameters})["id"])

    def state(self, run: str) -> str:
        return str(self.request(f"flow_runs/{run}")["state"]["type"])

    def wait(self, run: str, *states: str, timeout: float = 180) -> str:
        deadline = time.monotonic() + timeout
        while (state := self.state(run)) not in states:
            assert time.monotonic() < deadline, f"still {state} after {timeout} s"
            time.sleep(0.2)
        return state


@pytest.fixture(scope="module")
def prefect(home: Path) -> Iterator[Prefect]:
    server = Prefect(home)
    server.start("server", "start", "--host", "127.0.0.1", "--port", str(server.port))
    deadline = time.monotonic() + 90
    while True:
        try:
            server.request("health")
            break
        except OSError:
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.5)
    server.command("work-pool", "create", "local", "--type", "process")
    server.command("--no-prompt", "deploy", "--all")
    server.start("worker", "start", "--pool", "local")
    yield server
    for process in reversed(server.running):
        process.terminate()
    for process in server.running:
        process.wait(30)


def test_a_deployed_run_is_cancelled_with_a_checkpoint_and_run_again_to_its_end(prefect: Prefect, finished: Path, home: Path) -> None:
    store = home / "deployed"
    shutil.copytree(finished, store)
    for kind in ("cooldown", "evaluate", "export"):
        shutil.rmtree(store / kind)
    annealing = Artifact(Store.open(str(store)), plan_of(store, LONGER).graph.nodes["cooldown"].path)

    run = prefect.run(spec=SMOKE, store=str(store), overrides=[LONGER], until="cooldown")
    deadline = time.monotonic() + 120
    while not annealing.checkpoint_steps():
        assert time.monotonic() < deadline, prefect.state(run)
        time.sleep(0.05)
    prefect.command("flow-run", "cancel", run)
    assert prefect.wait(run, "CANCELLED", "CRASHED", "FAILED", "COMPLETED") == "CANCELLED"
    steps = annealing.checkpoint_steps()
    assert 0 < steps[-1] < 1500
    annealing.verify_checkpoint(annealing.checkpoint(steps[-1]))

    again = prefect.run(spec=SMOKE, store=str(store))
    assert prefect.wait(again, "CANCELLED", "CRASHED", "FAILED", "COMPLETED") == "COMPLETED"
    assert plan_of(store).pending == []
    tasks = prefect.request("task_runs/filter", {"flow_runs": {"id": {"any_": [again]}}, "limit": 50})
    states = {task["name"]: task["state"]["name"] for task in tasks}
    assert states["pretrain/2"] == "Cached"
    assert states["export"] == "Completed"
    tables = prefect.request("artifacts/filter", {"flow_runs": {"id": {"any_": [again]}}})
    assert any(table["key"] == "smoke-evaluate" and "perplexity" in table["data"] for table in tables)
    logs = prefect.request("logs/filter", {"logs": {"flow_run_id": {"any_": [again]}}, "limit": 200})
    assert any("perplexity:" in line["message"] for line in logs)


def test_a_wrong_parameter_is_refused_at_submission(prefect: Prefect) -> None:
    with pytest.raises(OSError, match=r"409|422"):
        prefect.run(spec=SMOKE, overrides="not a list")
