"""A real Prefect server and worker: deploy, run, cancel in the middle, kill the worker in the middle, lose the server, run to the end."""

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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ruamel.yaml import YAML

from infra.store import Artifact, Store
from tests.e2e.conftest import ROOT, SMOKE
from tests.e2e.test_smoke import plan_of

LONGER = "stages.cooldown.budget=800 steps"
pytestmark = pytest.mark.timeout(900)  # with the server, and runs, as set-up

OVER = ("CANCELLED", "CRASHED", "FAILED", "COMPLETED")


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

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "prefect", *arguments]
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(command, cwd=ROOT, env=self.environment, stdout=quiet, stderr=quiet, start_new_session=True)
        self.running.append(process)
        return process

    def start_server(self) -> None:
        """Starts it, and registers what prefect.yaml says."""
        self.server = self.start("server", "start", "--host", "127.0.0.1", "--port", str(self.port))
        deadline = time.monotonic() + 90
        while True:
            try:
                self.request("health")
                break
            except OSError:
                assert time.monotonic() < deadline, "the server did not start"
                time.sleep(0.5)
        self.command("work-pool", "create", "local", "--type", "process")
        self.command("--no-prompt", "deploy", "--all")
        self.worker = self.start("worker", "start", "--pool", "local")

    def lose_server(self) -> None:
        """Everything that Prefect knows is gone."""
        for process in (self.worker, self.server):
            process.terminate()
            process.wait(60)
        shutil.rmtree(self.environment["PREFECT_HOME"])

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
    try:
        server.start_server()
        yield server
    finally:
        for process in reversed(server.running):
            process.terminate()
        for process in server.running:
            process.wait(60)


@pytest.fixture
def half(finished: Path, tmp_path: Path) -> Path:
    """A store in which pretraining is finished, and nothing after it."""
    store = tmp_path / "deployed"
    shutil.copytree(finished, store)
    for kind in ("cooldown", "evaluate", "export"):
        shutil.rmtree(store / kind)
    return store


def _annealing(store: Path) -> Artifact:
    return Artifact(Store.open(str(store)), plan_of(store, LONGER).graph.nodes["cooldown"].path)


def _first_checkpoint(artifact: Artifact, prefect: Prefect, run: str) -> None:
    deadline = time.monotonic() + 120
    while not artifact.checkpoint_steps():
        assert time.monotonic() < deadline, prefect.state(run)
        time.sleep(0.05)


def _stopped_with_a_checkpoint(artifact: Artifact) -> None:
    """No process works on the store any more, and the last committed checkpoint is sound."""
    deadline = time.monotonic() + 60
    while left := _processes(artifact.path):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    steps = artifact.checkpoint_steps()
    assert 0 < steps[-1] < 800
    artifact.verify_checkpoint(artifact.checkpoint(steps[-1]))


def _processes(path: str) -> list[str]:
    """Command lines of processes that run a job of that artifact: the job file is their last argument."""
    found = []
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
            if "apertus_model.stages" in command and json.loads(Path(command[-1]).read_text())["path"] == path:
                found.append(" ".join(command))
        except (psutil.Error, OSError, ValueError):
            continue
    return found


def test_there_is_one_deployment_per_recipe(prefect: Prefect) -> None:
    recipes = {path.stem for path in (ROOT / "specs" / "recipes").glob("*.yaml")}
    deployments = prefect.request("deployments/filter", {"limit": 200})
    assert {deployment["name"] for deployment in deployments} == recipes
    assert all(deployment["parameters"]["spec"] == f"specs/recipes/{deployment['name']}.yaml" for deployment in deployments)
    assert all((ROOT / deployment["parameters"]["spec"]).exists() for deployment in deployments)


def test_the_checked_in_deployments_name_no_machine() -> None:
    text = (ROOT / "prefect.yaml").read_text()
    assert YAML(typ="safe").load(text)["pull"][0]["prefect.deployments.steps.set_working_directory"]["directory"] == "{{ $PWD }}"
    assert "/home" not in text and "/work" not in text and "/root" not in text


@pytest.mark.parametrize(
    "wrong",
    [
        {"overrides": "not a list"},
        {"overrides": ["no value"]},
        {"until": "two words"},
        {"spec": "recipe.txt"},
        {"store": "s3://key:secret@host/bucket"},
    ],
    ids=str,
)
def test_a_wrong_parameter_is_refused_at_submission(prefect: Prefect, wrong: dict[str, Any]) -> None:
    with pytest.raises(urllib.error.HTTPError, match=r"409|422"):
        prefect.run(**{"spec": SMOKE, **wrong})


def test_a_deployed_run_is_cancelled_with_a_checkpoint_and_run_again_to_its_end(prefect: Prefect, half: Path) -> None:
    annealing = _annealing(half)
    run = prefect.run(spec=SMOKE, store=str(half), overrides=[LONGER], until="cooldown")
    _first_checkpoint(annealing, prefect, run)
    prefect.command("flow-run", "cancel", run)
    assert prefect.wait(run, *OVER) == "CANCELLED"
    _stopped_with_a_checkpoint(annealing)
    bars = prefect.request("artifacts/filter", {"flow_runs": {"id": {"any_": [run]}}})
    assert [bar["type"] for bar in bars if bar["key"] == "smoke-cooldown-progress"] == ["progress"]

    again = prefect.run(spec=SMOKE, store=str(half))
    assert prefect.wait(again, *OVER) == "COMPLETED"
    assert plan_of(half).pending == []
    tasks = prefect.request("task_runs/filter", {"flow_runs": {"id": {"any_": [again]}}, "limit": 50})
    states = {task["name"]: task["state"]["name"] for task in tasks}
    assert states["pretrain/2"] == "Cached"
    assert states["export"] == "Completed"
    pages = {page["key"]: page for page in prefect.request("artifacts/filter", {"flow_runs": {"id": {"any_": [again]}}})}
    assert "perplexity" in pages["smoke-evaluate"]["data"]
    assert (half / "reports" / "smoke" / f"{again}.html").exists()
    assert f"reports/smoke/{again}.html" in pages["smoke-run"]["data"]
    assert "| export | export | finished |" in pages["smoke-run"]["data"]
    logs = prefect.request("logs/filter", {"logs": {"flow_run_id": {"any_": [again]}}, "limit": 200})
    assert any("perplexity:" in line["message"] for line in logs)


def test_a_run_outlives_its_worker_and_its_server_in_the_store(prefect: Prefect, half: Path) -> None:
    annealing = _annealing(half)
    run = prefect.run(spec=SMOKE, store=str(half), overrides=[LONGER], until="cooldown")
    _first_checkpoint(annealing, prefect, run)
    prefect.worker.kill()
    prefect.worker.wait()
    assert prefect.wait(run, *OVER) == "CANCELLED"
    _stopped_with_a_checkpoint(annealing)
    before = annealing.checkpoint_steps()[-1]

    prefect.lose_server()
    prefect.start_server()
    again = prefect.run(spec=SMOKE, store=str(half), overrides=[LONGER, "stages.cooldown.checkpoint.interval=400"], until="cooldown")
    assert prefect.wait(again, *OVER) == "COMPLETED"
    steps = [row["step"] for row in Artifact(Store.open(str(half)), annealing.path, 800).history() if "loss" in row]
    assert steps == list(range(1, 801))
    assert before > 0
