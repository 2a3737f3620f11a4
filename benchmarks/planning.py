"""CPU seconds of the command line, imports included: `python -m benchmarks.planning [RECIPE]...`

Each command is a process of its own: help, the completion of a shell, and the plan of every recipe, with an
empty store and without a network. CPU seconds are those of the process (user and system): `start` until the
program runs, `import` until the planner is there, `read` until the recipe is checked, `plan`, and `print`.
`modules` are loaded at the end. What is above its limit is marked, and the exit code is then 1. Numbers are
the least of some runs, since other work on the machine only adds to them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

RECIPES = Path(__file__).parents[1] / "specs" / "recipes"
LIMITS = {"--help": 0.4, "completion": 0.4, "mini": 0.9}  # CPU seconds
LIMIT = 1.5  # of the other recipes, of which that of the 70B has the longest plan
STEPS = ("start", "import", "read", "plan", "print")
HEAD = """
import io, json, sys, time
seconds = [time.process_time()]
def done():
    seconds.append(time.process_time() - sum(seconds))
"""
END = "sys.__stdout__.write(json.dumps([len(sys.modules), seconds]))"
COMMAND = f"""{HEAD}
from flows.cli.__main__ import main
done()
sys.argv[0], sys.stdout = "apertus", io.StringIO()
try:
    main()
except SystemExit:
    pass
done()
{END}
"""
PLAN = f"""{HEAD}
from flows.cli.app import make_console, make_plan
from infra.imports import quick_imports
with quick_imports():
    from flows.cli.tables.plan import show_plan
    from flows.planning.plan import make
    from infra.store import Store
    from specs.recipe import load
done()
pipeline = load(sys.argv[1])
done()
plan = make(pipeline, Store.open(sys.argv[2]), ask_network=False)
done()
show_plan(make_console(file=io.StringIO(), width=140), plan)
done()
{END}
"""
COMPLETION = {
    "_APERTUS_COMPLETE": "complete_bash",
    "_TYPER_COMPLETE_ARGS": "apertus pl",
    "COMP_WORDS": "apertus pl",
    "COMP_CWORD": "1",
}


def measure(
    program: str, arguments: list[str], environment: dict[str, str], runs: int
) -> tuple[int, list[float]]:
    """Loaded modules, and the CPU seconds of each step in the fastest of so many processes."""
    results = []
    for _ in range(runs):
        process = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            check=True,
            capture_output=True,
            text=True,
            env=os.environ | environment,
        )
        results.append(json.loads(process.stdout))
    modules, seconds = min(results, key=lambda result: sum(result[1]))
    return modules, seconds


def main() -> None:
    """Prints a line for each command and recipe."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="*", type=Path, default=sorted(RECIPES.glob("*.yaml")))
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    above = 0
    print(f"{'':30} {'modules':>7}" + "".join(f" {step:>7}" for step in (*STEPS, "all", "limit")))
    with tempfile.TemporaryDirectory() as store:
        measured = [
            ("--help", COMMAND, ["--help"], {}),
            ("completion", COMMAND, [], COMPLETION),
            *((recipe.stem, PLAN, [str(recipe), store], {}) for recipe in options.recipes),
        ]
        for name, program, arguments, environment in measured:
            modules, seconds = measure(program, arguments, environment, options.runs)
            limit = LIMITS.get(name, LIMIT)
            over = sum(seconds) > limit
            above += over
            middle = "" if program is PLAN else f"{'':8}" * 2
            start, imported, *rest = (f" {value:7.2f}" for value in seconds)
            numbers = f"{start}{imported}{middle}{''.join(rest)} {sum(seconds):7.2f} {limit:7.2f}"
            print(f"{name:30} {modules:7}{numbers}{'   above' if over else ''}", flush=True)
    sys.exit(1 if above else 0)


if __name__ == "__main__":
    main()
