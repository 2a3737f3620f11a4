"""`apertus status`, `report`, `inspect` and `schema`: what they print and write."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from flows.planning.plan import Plan
from tests.flows.report.report_store import trained

Planned = Callable[..., Plan]


def test_the_command_writes_the_file_and_loads_neither_torch_nor_prefect(
    recipe: Path, planned: Planned, tmp_path: Path
) -> None:
    plan = trained(planned())
    before = sorted(str(path) for path in Path(plan.store.root).rglob("*"))
    program = (
        "import sys; from flows.cli.__main__ import app; "
        f"app(['report', {str(recipe)!r}, '--store', {plan.store.url!r}], standalone_mode=False); "
        "sys.exit(sum(name in sys.modules for name in ('torch', 'prefect')))"
    )
    root = Path(__file__).resolve().parents[4]
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={"PYTHONPATH": str(root), "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "tiny-report.html" in done.stdout and (tmp_path / "tiny-report.html").read_text().startswith(
        "<!doctype html>"
    )
    assert sorted(str(path) for path in Path(plan.store.root).rglob("*")) == before
