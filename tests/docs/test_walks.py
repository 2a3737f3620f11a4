"""The walks in `docs/architecture.md` name functions in the order in which the program first calls them."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, SMOKE

STEP = re.compile(r"^\d+\. `([\w/]+\.py)` `([\w.]+)`", re.MULTILINE)
TRACED = """
import json, os, sys, threading
root, found, calls = os.getcwd() + "/", sys.argv.pop(1), {}
def note(frame, event, argument):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(root):
        calls.setdefault((code.co_filename.removeprefix(root), code.co_qualname))
def trace(run):
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        with open(found, "w") as file:
            json.dump(list(calls), file)
"""
COMMAND = """
import flows.execution.flow
from flows.cli.__main__ import app
trace(lambda: app(sys.argv[1:], standalone_mode=False))
"""

STAGE = """
import flows.execution.runner as runner
from apertus_model.stages.__main__ import main
from flows.planning.plan import make
from infra.store import Store
from specs.recipe import load
from tests.flows.execution.notes import Notes
class Here:
    def __init__(self, job, *_, **__):
        self.file = job.scratch + "/job.json"
        with open(self.file, "w") as file:
            file.write(job.model_dump_json())
    def stop(self, reason): ...
    def run(self, *_):
        trace(lambda: main(self.file))
        os._exit(0)
runner.launch_job = Here
recipe = load(sys.argv[1], ["stages.pretrain.validation.interval=0"])
plan = make(recipe, Store.open(sys.argv[2]))
runner.Runner(plan, Notes()).run(plan.graph.nodes["pretrain/1"])
"""
TITLES = ["From the YAML file to the process of a stage", "From a token file to the loss"]


def walk(title: str) -> list[tuple[str, str]]:
    """The steps below a heading of the page: file and function."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.split(f"## {title}\n")[1].split("\n## ")[0]
    return STEP.findall(section)


def first_calls(program: str, folder: Path, *arguments: str) -> list[tuple[str, str]]:
    """Functions of the project, in the order in which a program first calls each."""
    found = folder / "calls.json"
    command = [sys.executable, "-c", TRACED + program, str(found), *arguments]
    environment = os.environ | {"PREFECT_HOME": str(folder / "prefect")}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes) as process:
        assert process.stdout is not None
        # before standard input ends: a stage takes that for the end of its launcher
        output = process.stdout.read()
    assert process.returncode == 0, output
    return [(file, name) for file, name in json.loads(found.read_text())]


@pytest.mark.parametrize("title", TITLES)
def test_a_walk_names_functions_of_the_project(title: str) -> None:
    steps = walk(title)
    assert 10 <= len(steps) <= 25
    for file, name in steps:
        names = set()
        for node in ast.parse((ROOT / file).read_text()).body:
            if isinstance(node, ast.ClassDef):
                names |= {
                    f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)
                }
            elif isinstance(node, ast.FunctionDef):
                names.add(node.name)
        assert name in names, f"{file} has no {name}"


@pytest.mark.slow
def test_apertus_run_and_a_stage_call_what_the_walks_say_in_their_order(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    calls = first_calls(COMMAND, tmp_path, "run", SMOKE, "--store", store, "--until", "main")
    steps = walk(TITLES[0])
    assert [step for step in calls if step in steps] == steps
    calls = first_calls(STAGE, tmp_path, SMOKE, store)
    steps = walk(TITLES[1])
    assert [step for step in calls if step in steps] == steps
