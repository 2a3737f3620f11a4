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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ruamel.yaml import YAML

from flows.execution.prefect_pages import key
from flows.planning.plan import make
from infra.store import Artifact, Store
from specs.recipe import load
from tests.e2e.conftest import ROOT, SMOKE
from tests.e2e.test_smoke import plan_of

STEPS = 300
LONGER = f"stages.cooldown.budget={STEPS} steps"
ENDS_ONLY = "stages.cooldown.checkpoint.interval=1_000_000"  # a checkpoint in the middle is one that being stopped has made
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
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env=self.environment,
            stdin=stdin,
            stdout=quiet,
            stderr=quiet,
            start_new_session=True,
        )
        self.running.append(process)
        return process

    def start_server(self, *deployed: str) -> None:
        """Starts it, and registers what prefect.yaml says: those, or all."""
        self.server = self.start("server", "start", "--host", "127.0.0.1", "--port", str(self.port))
        deadline = time.monotonic() + 90
        while True:
            try:
                self.request("health")
                break
            except OSError:
                assert time.monotonic() < deadline, "the server did not start"
                time.sleep(0.1)
        self.command("work-pool", "create", "local", "--type", "process")
        self.start_worker()
        self.command("--no-prompt", "deploy", *([f"--name={name}" for name in deployed] or ["--all"]))

    def start_worker(self) -> None:
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
        return str(self.request(f"deployments/{deployment}/create_flow_run", {"parameters": parameters})["id"])

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
        return {item["key"]: item for item in self.request("artifacts/filter", {"flow_runs": {"id": {"any_": [run]}}, "limit": 200})}

    def progress(self, run: str, key: str) -> float:
        """Percent; 0 for what is not shown yet."""
        shown = self.artifacts(run).get(key, {"type": "progress", "data": 0.0})
        assert shown["type"] == "progress"
        return float(shown["data"])


@pytest.fixture(scope="module")
def prefect(home: Path) -> Iterator[Prefect]:
    server = Prefect(home)
    try:
        server.start_server()
        yield server
    finally:
        for process in reversed(server.running):  # a worker before its server, without which it does not end
            process.terminate()
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


def _stopped_in_the_middle(prefect: Prefect, artifact: Artifact, run: str, stop: Callable[[], object], state: str) -> int:
    """Stops the run when its page says that the annealing moves. The step of the checkpoint that this makes, the only one of the run, when
    no process works on the store any more."""
    before, deadline = artifact.checkpoint_steps(), time.monotonic() + 300
    while not (shown := prefect.progress(run, "smoke-cooldown-progress")):
        assert prefect.state(run) not in OVER and time.monotonic() < deadline, prefect.state(run)
        time.sleep(0.05)
    assert artifact.checkpoint_steps() == before
    stop()
    assert prefect.wait(run) == state
    deadline = time.monotonic() + 60
    while left := _processes(artifact.path):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    (step,) = set(artifact.checkpoint_steps()) - set(before)
    assert max([0, *before]) < step < STEPS
    assert 0 < shown <= prefect.progress(run, "smoke-cooldown-progress") < 100
    artifact.checkpoint(step).check()
    return step


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


@pytest.mark.slow
def test_a_run_that_is_cancelled_and_loses_its_worker_and_its_server_goes_on_to_its_end(prefect: Prefect, half: Path) -> None:
    annealing = _annealing(half)
    asked = {"spec": SMOKE, "store": str(half), "overrides": [LONGER, ENDS_ONLY]}
    run = prefect.run(**asked)
    cancelled = _stopped_in_the_middle(prefect, annealing, run, lambda: prefect.cancel(run), "CANCELLED")
    run = prefect.run(**asked)
    orphaned = _stopped_in_the_middle(prefect, annealing, run, prefect.worker.kill, "CANCELLED")
    prefect.lose_server()
    prefect.start_server("mini")
    run = prefect.run(**asked)
    assert prefect.wait(run) == "COMPLETED"

    assert plan_of(half, LONGER).pending == []
    steps: dict[str, list[int]] = {}
    manifest = Artifact(annealing.store, annealing.path, STEPS).manifest
    for entry in manifest.history:
        rows = annealing.history(manifest.model_copy(update={"history": [entry]}))
        steps.setdefault(entry.path.split("/")[0], []).extend(row["step"] for row in rows if "loss" in row)
    parts = [(1, cancelled), (cancelled + 1, orphaned), (orphaned + 1, STEPS)]
    assert list(steps.values()) == [list(range(first, last + 1)) for first, last in parts]  # of an attempt each

    states = prefect.tasks(run)
    assert states["pretrain/2"] == "Cached"
    assert states["cooldown"] == states["export"] == "Completed"
    pages = prefect.artifacts(run)
    assert prefect.progress(run, "smoke-cooldown-progress") == 100
    assert "perplexity" in pages["smoke-evaluate"]["data"]
    assert (half / "reports" / "smoke" / f"{run}.html").exists()
    assert f"reports/smoke/{run}.html" in pages["smoke-run"]["data"]
    assert "| export | export | finished |" in pages["smoke-run"]["data"]
    logs = prefect.request("logs/filter", {"logs": {"flow_run_id": {"any_": [run]}}, "limit": 200})
    assert any("perplexity:" in line["message"] for line in logs)


def test_the_guard_of_a_process_that_is_gone_speaks_for_a_run_that_is_shown_as_running_and_no_other(prefect: Prefect) -> None:
    flow = prefect.request("deployments/name/apertus/mini")["flow_id"]
    shown = ["RUNNING", "CANCELLING"]
    runs = [prefect.request("flow_runs/", {"flow_id": flow, "state": {"type": state}})["id"] for state in shown]
    guards = [prefect.popen("flows.execution.watchdog", run, stdin=subprocess.PIPE) for run in runs]
    assert [prefect.state(run) for run in runs] == shown
    for guard in guards:
        assert guard.stdin is not None and guard.poll() is None
        guard.stdin.close()
    assert [guard.wait(60) for guard in guards] == [0, 0]
    assert [prefect.state(run) for run in runs] == ["CRASHED", "CANCELLING"]


@pytest.mark.slow
def test_a_run_whose_worker_is_told_to_stop_ends_as_crashed(prefect: Prefect, half: Path) -> None:
    run = prefect.run(spec=SMOKE, store=str(half), overrides=[LONGER, ENDS_ONLY])
    _stopped_in_the_middle(prefect, _annealing(half), run, prefect.worker.terminate, "CRASHED")
    prefect.start_worker()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_mini_recipe_runs_from_its_deployment_to_its_end(prefect: Prefect, tmp_path: Path) -> None:
    run = prefect.run(store=str(tmp_path / "store"))  # the rest is as deployed
    assert prefect.wait(run, timeout=3000) == "COMPLETED"
    plan = make(load(ROOT / "specs/recipes/mini.yaml", []), Store.open(str(tmp_path / "store")))
    assert plan.pending == []
    states = prefect.tasks(run)
    cached = {name for name, state in states.items() if state == "Cached"}
    assert cached <= {name for name, node in plan.graph.nodes.items() if plan.graph.twin(node)}  # made by the run itself, in another part
    assert states == {name: "Cached" if name in cached else "Completed" for name in plan.steps}
    assert {prefect.progress(run, key("mini", name, "progress")) for name in states.keys() - cached} == {100.0}
    assert f"reports/mini/{run}.html" in prefect.artifacts(run)["mini-run"]["data"]
