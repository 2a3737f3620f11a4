"""Two `apertus run` of one recipe over one store at the same time."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from flows.planning.plan import Plan, make
from infra.store import Artifact, Store
from specs.recipe import load
from tests.e2e.conftest import ROOT, SMOKE, Run

REDONE = ("evaluate", "export")


def plan_of(store: Path, *overrides: str) -> Plan:
    return make(load(ROOT / SMOKE, overrides), Store.open(str(store)))


def copy_of(finished: Path, store: Path, *without: str) -> Path:
    shutil.copytree(finished, store)
    for kind in without:
        shutil.rmtree(store / kind)
    return store


def attempts(plan: Plan, name: str) -> list[str]:
    return plan.store.names(f"{plan.graph.nodes[name].path}/attempts")


@pytest.mark.slow
def test_two_runs_at_once_make_every_part_once(finished: Path, home: Path, api: str) -> None:
    store = copy_of(finished, home / "two-runs", *REDONE)
    runs = [Run(home, "run", SMOKE, "--store", str(store), api=api) for _ in range(2)]
    for run in runs:
        assert run.wait() == 0, run.text
    plan = plan_of(store)
    assert plan.pending == []
    assert {name: len(attempts(plan, name)) for name in REDONE} == dict.fromkeys(REDONE, 1)
    assert "held by attempt" in runs[0].text + runs[1].text
    weights = [
        Artifact(p.store, p.graph.nodes["export"].path).manifest.files["model.safetensors"]
        for p in (plan, plan_of(finished))
    ]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_the_launcher_is_killed_and_the_next_run_waits_for_its_last_checkpoint(
    finished: Path, home: Path, api: str
) -> None:
    longer = "stages.cooldown.budget=60 steps"
    store = copy_of(finished, home / "killed-launcher", "cooldown")
    arguments = ("run", SMOKE, "--store", str(store), "--until", "cooldown", "--set", longer)
    run = Run(home, *arguments, api=api)
    annealing = Artifact(Store.open(str(store)), plan_of(store, longer).graph.nodes["cooldown"].path)
    run.wait_for(lambda: bool(annealing.checkpoint_steps()))
    os.kill(run.process.pid, signal.SIGKILL)  # the launcher alone; its stage notices and commits once more
    run.process.wait()
    again = Run(home, *arguments, api=api)
    assert again.wait() == 0, again.text
    assert "taken over from attempt" in again.text
    assert len(attempts(plan_of(store, longer), "cooldown")) == 2
    marker = annealing.checkpoint(60).marker
    assert len(marker.attempts) == 2  # the second resumed from the first
    assert run.no_process_is_left(5)
