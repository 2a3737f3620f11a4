"""Seconds that planning takes, of every recipe: `python -m benchmarks.planning`.

Each plan is a process of its own, as `apertus plan` is: `import` until the planner is there, `plan` to read,
check and plan the recipe, and `print` for its tables, with an empty store and without a network. Two seconds
for all of it are the limit that is aimed at; what is above it is marked, and the exit code is then 1. Numbers
are the least of some runs, since other work on the machine only adds to them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

RECIPES = Path(__file__).parents[1] / "specs" / "recipes"
LIMIT = 2.0  # seconds
PLANNED = """
import io, json, sys, tempfile, time
begin = time.perf_counter()
from rich.console import Console
from flows.planning.plan import make
from flows.cli.tables.plan import show_plan
from infra.store import Store
from specs.recipe import load
imported = time.perf_counter()
with tempfile.TemporaryDirectory() as folder:
    plan = make(load(sys.argv[1]), Store.open(folder), ask_network=False)
    planned = time.perf_counter()
    show_plan(Console(file=io.StringIO(), width=140), plan)
print(json.dumps([plan.parts, imported - begin, planned - imported, time.perf_counter() - planned]))
"""


def measure(recipe: Path, runs: int) -> tuple[int, list[float]]:
    """Parts of a recipe, and the seconds of the fastest of so many processes."""
    command = [sys.executable, "-c", PLANNED, str(recipe)]
    found = [
        json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        for _ in range(runs)
    ]
    return found[0][0], min((seconds for _, *seconds in found), key=sum)


def main() -> None:
    """Prints a line for each recipe."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="*", type=Path, default=sorted(RECIPES.glob("*.yaml")))
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    slow = 0
    print(f"{'recipe':30} {'parts':>5} {'import':>7} {'plan':>7} {'print':>7} {'all':>7}   limit {LIMIT:g} s")
    for recipe in arguments.recipes:
        parts, seconds = measure(recipe, arguments.runs)
        over = sum(seconds) > LIMIT
        slow += over
        numbers = " ".join(f"{value:7.2f}" for value in (*seconds, sum(seconds)))
        print(f"{recipe.stem:30} {parts:5} {numbers}{'   above' if over else ''}", flush=True)
    sys.exit(1 if slow else 0)


if __name__ == "__main__":
    main()
