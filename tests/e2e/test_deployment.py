"""A real Prefect server and worker: deploy, run, cancel in the middle, kill the worker in the middle, lose
the server, run to the end."""

from __future__ import annotations

import json
import re
import shutil
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
from tests.e2e.conftest import ROOT, SMOKE, Run
from tests.e2e.prefect_server import OVER, Prefect
from tests.e2e.test_smoke import plan_of

STEPS = 300
LONGER = f"stages.cooldown.budget={STEPS} steps"
# a checkpoint in the middle is one that being stopped has made
ENDS_ONLY = "stages.cooldown.checkpoint.interval=1_000_000"
pytestmark = pytest.mark.timeout(900)  # with the server, and runs, as set-up


@pytest.fixture(scope="module")
def prefect(server: Prefect) -> Iterator[Prefect]:
    server.deploy("mini")
    yield server
    server.worker.terminate()


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


def _stopped_in_the_middle(
    prefect: Prefect, artifact: Artifact, run: str, stop: Callable[[], object], state: str
) -> int:
    """Stops the run when its page says that the annealing moves. The step of the checkpoint that this
    makes, the only one of the run, when no process works on the store any more."""
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
            if (
                "apertus_model.stages" in command
                and json.loads(Path(command[-1]).read_text())["path"] == path
            ):
                found.append(" ".join(command))
        except (psutil.Error, OSError, ValueError):
            continue
    return found


@pytest.mark.slow
def test_there_is_one_deployment_per_recipe(prefect: Prefect) -> None:
    prefect.command("--no-prompt", "deploy", "--all")
    recipes = {path.stem for path in (ROOT / "specs" / "recipes").glob("*.yaml")}
    deployments = prefect.request("deployments/filter", {"limit": 200})
    assert {deployment["name"] for deployment in deployments} == recipes
    assert all(
        deployment["parameters"]["spec"] == f"specs/recipes/{deployment['name']}.yaml"
        for deployment in deployments
    )
    assert all((ROOT / deployment["parameters"]["spec"]).exists() for deployment in deployments)


def test_the_checked_in_deployments_name_no_machine() -> None:
    text = (ROOT / "prefect.yaml").read_text()
    assert (
        YAML(typ="safe").load(text)["pull"][0]["prefect.deployments.steps.set_working_directory"]["directory"]
        == "{{ $PWD }}"
    )
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


def test_a_recipe_of_ones_own_is_deployed_by_a_command(prefect: Prefect, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples" / "own_data", tmp_path / "own")
    recipe = tmp_path / "own" / "recipe.yaml"

    def deploy(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "flows.cli", "deploy", str(recipe), *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=prefect.environment, capture_output=True, text=True, check=False
        )

    done = deploy("--until", "corpus", "--set", "concurrency=2", "--cron", "0 3 * * *", "--tag", "nightly")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "Deployed apertus/own-data. It runs at 0 3 * * * (UTC).\n"
    made = prefect.request("deployments/name/apertus/own-data")
    assert made["entrypoint"] == "flows.execution.flow.pipeline" and not made["pull_steps"]
    assert made["parameters"] == {"spec": str(recipe), "until": "corpus", "overrides": ["concurrency=2"]}
    assert (made["tags"], made["work_pool_name"]) == (["own-data", "nightly"], "local")
    assert [schedule["schedule"]["cron"] for schedule in made["schedules"]] == ["0 3 * * *"]
    for arguments, message in (
        (
            ["--pool", "none"],
            "--pool: the server has no work pool 'none'. Fix: prefect work-pool create none",
        ),
        (["--cron", "at three"], "--cron: 'at three' is no schedule"),
    ):
        done = deploy(*arguments)
        assert done.returncode == 2 and message in done.stderr, done.stderr


@pytest.mark.slow
def test_a_run_that_is_cancelled_and_loses_worker_and_server_is_finished_by_later_runs(
    prefect: Prefect, half: Path
) -> None:
    annealing = _annealing(half)
    asked = {"spec": SMOKE, "store": str(half), "overrides": [LONGER, ENDS_ONLY]}
    run = prefect.run(**asked)
    cancelled = _stopped_in_the_middle(prefect, annealing, run, lambda: prefect.cancel(run), "CANCELLED")
    run = prefect.run(**asked)
    orphaned = _stopped_in_the_middle(prefect, annealing, run, prefect.worker.kill, "CRASHED")
    prefect.lose_server()
    prefect.start_server()
    prefect.deploy("mini")
    run = prefect.run(**asked)
    assert prefect.wait(run) == "COMPLETED"

    assert plan_of(half, LONGER).pending == []
    steps: dict[str, list[int]] = {}
    manifest = Artifact(annealing.store, annealing.path, STEPS).manifest
    for entry in manifest.history:
        rows = annealing.history(manifest.model_copy(update={"history": [entry]}))
        steps.setdefault(entry.path.split("/")[0], []).extend(row["step"] for row in rows if "loss" in row)
    parts = [(1, cancelled), (cancelled + 1, orphaned), (orphaned + 1, STEPS)]
    # of an attempt each
    assert list(steps.values()) == [list(range(first, last + 1)) for first, last in parts]

    states = prefect.tasks(run)
    assert states["pretrain/2"] == "Cached"
    assert states["cooldown"] == states["export"] == "Completed"
    pages = prefect.artifacts(run)
    assert prefect.progress(run, "smoke-cooldown-progress") == 100
    assert "perplexity" in pages["smoke-evaluate"]["data"]
    assert (half / "reports" / "smoke" / f"{run}.html").exists()
    assert f"reports/smoke/{run}.html" in pages["smoke-run"]["data"]
    assert re.search(
        r"\| evaluate \| evaluate \| finished \| .*perplexity.* \| \d+ \|", pages["smoke-run"]["data"]
    )
    assert prefect.request(f"flow_runs/{run}")["name"] == f"mini-{run[:4]}"
    logs = prefect.request("logs/filter", {"logs": {"flow_run_id": {"any_": [run]}}, "limit": 200})
    assert any("perplexity:" in line["message"] for line in logs)


def test_the_guard_of_a_dead_process_reports_only_a_run_that_is_shown_as_running(
    prefect: Prefect,
) -> None:
    flow = prefect.request("deployments/name/apertus/mini")["flow_id"]
    shown = ["RUNNING", "CANCELLING"]
    runs = [
        prefect.request("flow_runs/", {"flow_id": flow, "state": {"type": state}})["id"] for state in shown
    ]
    guards = [prefect.popen("flows.execution.watchdog", run, stdin=subprocess.PIPE) for run in runs]
    assert [prefect.state(run) for run in runs] == shown
    for guard in guards:
        assert guard.stdin is not None and guard.poll() is None
        guard.stdin.close()
    assert [guard.wait(60) for guard in guards] == [0, 0]
    assert [prefect.state(run) for run in runs] == ["CRASHED", "CANCELLING"]


def _end_process_of_run(prefect: Prefect) -> None:
    """What an eviction does: SIGTERM to the process itself, which nobody has asked the server for."""
    (process,) = psutil.Process(prefect.worker.pid).children()
    process.terminate()


@pytest.mark.slow
def test_a_run_whose_process_or_worker_gets_sigterm_ends_as_crashed(prefect: Prefect, half: Path) -> None:
    asked = {"spec": SMOKE, "store": str(half), "overrides": [LONGER, ENDS_ONLY]}
    for stop in (lambda: _end_process_of_run(prefect), prefect.worker.terminate):
        _stopped_in_the_middle(prefect, _annealing(half), prefect.run(**asked), stop, "CRASHED")
    prefect.start_worker()


@pytest.mark.slow
def test_a_run_of_the_command_line_that_is_killed_ends_as_crashed_on_the_server_that_it_names(
    prefect: Prefect, half: Path, tmp_path: Path
) -> None:
    words = ("run", SMOKE, "--store", str(half))
    run = Run(tmp_path, *words, overrides=[LONGER, ENDS_ONLY], api=prefect.api)

    def shown() -> list[str]:
        query = {"flow_runs": {"tags": {"all_": ["smoke"]}}, "sort": "START_TIME_DESC", "limit": 1}
        return [found["id"] for found in prefect.request("flow_runs/filter", query) if run.stage_processes()]

    run.wait_for(lambda: bool(shown()))
    (number,) = shown()
    run.process.kill()
    assert prefect.wait(number) == "CRASHED"
    assert run.no_process_is_left(within=60)


@pytest.mark.slow
def test_a_recipe_outside_the_checkout_finds_its_files_and_its_store(
    prefect: Prefect, tmp_path: Path
) -> None:
    recipe = shutil.copytree(ROOT / "examples" / "own_data", tmp_path / "own") / "recipe.yaml"
    run = prefect.run(spec=str(recipe), until="tokenizer")
    assert prefect.wait(run) == "COMPLETED"
    plan = make(load(recipe), Store.open(str(tmp_path / "own" / "apertus-store")))
    assert [name for name, step in plan.steps.items() if step.action == "reuse"] == ["tokenizer"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_mini_recipe_runs_from_its_deployment_to_its_end(prefect: Prefect, tmp_path: Path) -> None:
    run = prefect.run(store=str(tmp_path / "store"))  # the rest is as deployed
    assert prefect.wait(run, timeout=3000) == "COMPLETED"
    plan = make(load(ROOT / "specs/recipes/mini.yaml", []), Store.open(str(tmp_path / "store")))
    assert plan.pending == []
    states = prefect.tasks(run)
    cached = {name for name, state in states.items() if state == "Cached"}
    # made by the run itself, in another part
    assert cached <= plan.graph.duplicates.keys()
    assert states == {name: "Cached" if name in cached else "Completed" for name in plan.steps}
    ran = states.keys() - cached
    shown = {name: prefect.progress(run, key("mini", name, "progress")) for name in ran}
    assert 100.0 in shown.values() and {*shown.values()} <= {0.0, 100.0}  # 0: it took a few seconds
    assert f"reports/mini/{run}.html" in prefect.artifacts(run)["mini-run"]["data"]
