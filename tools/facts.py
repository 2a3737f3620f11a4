"""Prints how often the program writes one fact down: the forms in which a value is held, and the files that
handle it, on three walks through the first training stage of the smoke recipe. `python -m tools.facts`

A walk runs the real program and looks, at every return of a function of the project, for the value among the
function's variables and its result. A *form* is a field of an object, a key of a mapping, or an array. A file
counts if it also names the value: what only passes on whatever it is given does not write the fact down.
"""

from __future__ import annotations

import ast
import contextlib
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).parents[1]
FOLDERS = ("specs", "flows", "apertus_model", "infra")
PRODUCT = tuple(f"{ROOT / folder}/" for folder in FOLDERS)
ARRAYS = ("ndarray", "memmap", "Tensor")
RECIPE = ROOT / "specs" / "recipes" / "smoke.yaml"
SEGMENT = "pretrain/1"
RATE = 0.0051234  # no other number of the recipe
OVERRIDES = [f"stages.pretrain.optimizer.lr={RATE}", "stages.pretrain.schedule={}"]
WALKS = {
    "rate": (
        "a learning rate, from YAML to the optimizer",
        ("lr", "rate"),
        "apertus_model/optimizers/ademamix.py",
    ),
    "metric": ("a loss, from its step to the report", ("loss",), ""),
    "token": (
        "a token, from its file to the loss",
        ("token", "tokens", "input", "labels"),
        "apertus_model/losses/cross_entropy.py",
    ),
}
"""Title; what a file calls the value; the file at which the walk ends."""


class Walk:
    """The forms and files of a value, in the order in which the program comes to them."""

    def __init__(self, name: str, holds: Callable[[Any], bool]) -> None:
        self.title, self._names, self._end = WALKS[name]
        self._holds = holds
        self._ended = False
        self.forms: dict[str, None] = {}
        self.files: dict[str, None] = {}

    def __call__(self, frame: FrameType, event: str, result: Any) -> None:
        file = frame.f_code.co_filename
        if event != "return" or self._ended or not file.startswith(PRODUCT):
            return
        for value in [*frame.f_locals.values(), result]:
            forms = list(self._forms(value))
            if forms or self._holds(value):
                self.files.setdefault(file.removeprefix(f"{ROOT}/"))
                self.forms.update(dict.fromkeys(forms))
        self._ended = self._end in self.files

    def _forms(self, value: Any) -> Iterator[str]:
        kind = type(value)
        if kind.__module__.partition(".")[0] in FOLDERS:
            fields: dict[str, Any] = getattr(value, "__dict__", {})
            yield from (f"{kind.__name__}.{name}" for name, held in fields.items() if self._holds(held))
        elif isinstance(value, Mapping) and len(value) < 100:
            yield from (f"{kind.__name__}[{key!r}]" for key, held in value.items() if self._holds(held))
        elif kind.__name__ in ARRAYS and self._holds(value):
            yield f"{kind.__name__} of {value.dtype}"

    @property
    def naming(self) -> list[str]:
        """The files whose code names the value."""
        return [file for file in self.files if any(name in self._names for name in _names(ROOT / file))]

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)


def _names(file: Path) -> Iterator[str]:
    """The names, fields and texts in the code of a file."""
    for node in ast.walk(ast.parse(file.read_text())):
        for field in ("id", "attr", "arg", "value"):
            if isinstance(name := getattr(node, field, None), str):
                yield name


def train(store: str, walk: Walk) -> None:
    """Plans the recipe, trains its first segment in this process, and reads it for a report."""
    import flows.execution.runner as runner
    from apertus_model.stages.__main__ import main
    from flows.planning.plan import make
    from flows.report import render
    from infra.launchers.local import Ended
    from infra.store import Store
    from specs.recipe import load
    from tests.flows.execution.notes import Notes

    class Here:
        """A stage in this process, in place of one of its own."""

        def __init__(self, job: Any, *_: Any, **__: Any) -> None:
            self.file = f"{job.scratch}/job.json"
            Path(self.file).write_text(job.model_dump_json())

        def stop(self, reason: str) -> None: ...

        def run(self, *_: Any) -> Ended:
            main(self.file)
            return Ended(0, "", (), None)

    with walk.watching():
        plan = make(load(RECIPE, OVERRIDES), Store.open(store))
        with patch.object(runner, "launch_job", Here):
            runner.Runner(plan, Notes()).run(plan.graph.nodes[SEGMENT])  # type: ignore[arg-type]
        render(plan)


def value_of(name: str, store: str) -> float:
    """The value that a walk follows. Of a run that was made before: its last loss, or the largest token of
    its first sample."""
    from flows.stored_run import open_run

    if name == "rate":
        return RATE
    run = open_run(RECIPE, *OVERRIDES, store=store)
    if name == "token":
        (sample,) = run.samples(SEGMENT, limit=1)
        return float(max(sample["input"]))
    losses = [row["loss"] for row in run.metrics("pretrain").to_pylist() if row["part"] == SEGMENT]
    return float(next(loss for loss in reversed(losses) if loss is not None))


def is_number(value: float) -> Callable[[Any], bool]:
    return lambda held: type(held) is float and held == value


def has_token(token: int) -> Callable[[Any], bool]:
    """Whether an array or a tensor of whole numbers has a token."""

    def holds(held: Any) -> bool:
        return type(held).__name__ in ARRAYS and "int" in str(held.dtype) and bool((held == token).any())

    return holds


def follow(name: str, store: str, value: float) -> None:
    """Makes a walk, and prints it."""
    walk = Walk(name, has_token(int(value)) if name == "token" else is_number(value))
    train(store, walk)
    print(f"\n{walk.title}: {len(walk.forms)} forms, {len(walk.naming)} files")
    for what, names in (("form", walk.forms), ("file", walk.naming)):
        print("\n".join(f"  {what}  {name}" for name in names))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        pretrained, fresh = Path(folder) / "made", Path(folder) / "fresh"
        apertus = [
            sys.executable,
            "-m",
            "flows.cli",
            "run",
            str(RECIPE),
            *(x for override in OVERRIDES for x in ("--set", override)),
        ]
        for store, until in ((fresh, "main"), (pretrained, "pretrain")):
            subprocess.run(
                [*apertus, "--store", store, "--until", until], check=True, stdout=subprocess.DEVNULL
            )
        for name in WALKS:
            store = shutil.copytree(fresh, Path(folder) / name)
            value = str(value_of(name, str(pretrained)))
            # a stage takes the end of its standard input for the end of its launcher
            walk = subprocess.Popen(
                [sys.executable, "-m", "tools.facts", name, store, value], stdin=subprocess.PIPE
            )
            if walk.wait():
                sys.exit(f"the walk of {name} failed")


if __name__ == "__main__":
    main() if len(sys.argv) == 1 else follow(sys.argv[1], sys.argv[2], float(sys.argv[3]))
