"""A Prefect server for tests, and commands against it."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OVER = ("CANCELLED", "CRASHED", "FAILED", "COMPLETED")


class Prefect:
    """A server on the loopback address, and commands against it."""

    host = "127.0.0.1"

    def __init__(self, home: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.api = f"http://{self.host}:{self.port}/api"
        self.environment = os.environ | {
            "PREFECT_HOME": str(home / "prefect-server"),
            "PREFECT_API_URL": self.api,
            "DO_NOT_TRACK": "1",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_UI_ENABLED": "false",
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "PWD": str(ROOT),
        }
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        return self.popen("prefect", *arguments)

    def popen(self, module: str, *arguments: str, stdin: int | None = None) -> subprocess.Popen[bytes]:
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(
            self.command_line(sys.executable, "-m", module, *arguments),
            cwd=ROOT,
            env=self.environment,
            stdin=stdin,
            stdout=quiet,
            stderr=quiet,
            start_new_session=True,
        )
        self.running.append(process)
        return process

    def command_line(self, *words: str) -> list[str]:
        """The command that runs another where the server is."""
        return [*words]

    def answers(self) -> bool:
        try:
            self.request("health")
        except OSError:
            return False
        return True

    def start_server(self) -> None:
        """Starts it, and waits until it answers."""
        self.server = self.start("server", "start", "--host", self.host, "--port", str(self.port))
        deadline = time.monotonic() + 90
        while not self.answers():
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.1)

    def deploy(self, *names: str) -> None:
        """Registers the deployments of prefect.yaml, these or all, and starts a worker for them."""
        self.command("work-pool", "create", "local", "--type", "process")
        self.start_worker()
        self.command("--no-prompt", "deploy", *([f"--name={name}" for name in names] or ["--all"]))

    def start_worker(self) -> None:
        self.worker = self.start("worker", "start", "--pool", "local")

    def lose_server(self) -> None:
        """Everything that Prefect knows is gone."""
        for process in (self.worker, self.server):
            process.terminate()
            process.wait(60)
        shutil.rmtree(self.environment["PREFECT_HOME"])

    def stop(self) -> None:
        """Ends the server and what was started for it."""
        for process in reversed(self.running):  # a worker before its server, without which it does not end
            process.terminate()
            process.wait(60)

    def command(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "prefect", *arguments]
        done = subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def request(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"{self.api}/{path}", data=data, headers={"Content-Type": "application/json"}
        )
        for patience in reversed(range(30)):
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as error:
                if error.code != 503 or not patience:  # its database is busy
                    raise
                time.sleep(1)

    def run(self, **parameters: Any) -> str:
        deployment = self.request("deployments/name/apertus/mini")["id"]
        return str(
            self.request(f"deployments/{deployment}/create_flow_run", {"parameters": parameters})["id"]
        )

    def cancel(self, run: str) -> None:
        """What `prefect flow-run cancel` and the page's button ask for."""
        self.request(f"flow_runs/{run}/set_state", {"state": {"type": "CANCELLING"}})

    def state(self, run: str) -> str:
        return str(self.request(f"flow_runs/{run}")["state"]["type"])

    def wait(self, run: str, timeout: float = 400) -> str:
        """How it ends."""
        deadline = time.monotonic() + timeout
        while (state := self.state(run)) not in OVER:
            assert time.monotonic() < deadline, f"still {state} after {timeout} s"
            time.sleep(0.2)
        return state

    def tasks(self, run: str) -> dict[str, str]:
        """The state of each part, as it is shown."""
        found = self.request("task_runs/filter", {"flow_runs": {"id": {"any_": [run]}}, "limit": 200})
        return {task["name"]: task["state"]["name"] for task in found}

    def artifacts(self, run: str) -> dict[str, dict[str, Any]]:
        """What its page shows, by key."""
        return {
            item["key"]: item
            for item in self.request("artifacts/filter", {"flow_runs": {"id": {"any_": [run]}}, "limit": 200})
        }

    def progress(self, run: str, key: str) -> float:
        """Percent; 0 for what is not shown yet."""
        shown = self.artifacts(run).get(key, {"type": "progress", "data": 0.0})
        assert shown["type"] == "progress"
        return float(shown["data"])
