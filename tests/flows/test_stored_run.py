from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flows import open_run
from flows.planning.plan import Plan
from specs.errors import SpecError

USED = ("sources.notes.license=CC0-1.0", "sources.notes.language=en")


def test_a_run_has_metrics_results_and_files(done: Plan, recipe: Path) -> None:
    run = open_run(recipe, *USED, store=done.store.url)
    assert repr(run) == f"<run of tiny: {len(done.steps)} of {len(done.steps)} parts are finished>"
    table = run.metrics("pretrain")
    rows = list(done.graph.nodes["pretrain/1"].artifact(done.store).history())
    assert rows and table.column("loss").to_pylist() == [row.get("loss") for row in rows]
    assert {*table.column("stage").to_pylist()} == {"pretrain"} and run.metrics().num_rows >= table.num_rows
    assert run.results("evaluate") == done.graph.nodes["evaluate"].artifact(done.store).manifest.metrics
    assert run.artifact("export").bytes("config.json") == b"{}"
    assert run.inspect("main", samples=10)["name"] == "main"


def test_what_is_not_there_is_named(done: Plan, recipe: Path) -> None:
    run = open_run(recipe, *USED, store=done.store.url)
    with pytest.raises(SpecError, match=r"there is no stage 'pretrian'"):
        run.metrics("pretrian")
    with pytest.raises(SpecError, match=r"'pretrain' has 3 parts.*pretrain/2"):
        run.artifact("pretrain")
    with pytest.raises(SpecError, match=r"'pretrain' has no such checkpoint.*the steps are 8, 12, 16"):
        run.tensors("pretrain", step=7)
    with pytest.raises(SpecError, match=r"'evaluate' has no such checkpoint.*the steps are none"):
        run.tensors("evaluate")


def test_the_package_imports_neither_torch_nor_prefect_until_it_is_used() -> None:
    program = (
        "import sys, flows; heavy = {'torch', 'prefect', 'pyarrow'}; print(sorted(heavy & {*sys.modules}));"
        "from flows import open_run; print(sorted(heavy - {'pyarrow'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == "[]"
