"""`apertus status`, `report`, `inspect` and `schema`: what they print and write."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from typer.testing import CliRunner

from flows.cli.__main__ import app
from flows.planning.plan import Plan
from specs.schema import json_schema
from tests.flows.report.report_store import trained

Planned = Callable[..., Plan]
ROOT = Path(__file__).resolve().parents[4]


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


def test_the_line_for_editors_names_the_schema_wherever_the_recipe_lies(tmp_path: Path) -> None:
    recipe = tmp_path / "copy.yaml"
    original = (ROOT / "specs" / "recipes" / "smoke.yaml").read_text()
    recipe.write_text(original)
    for _ in range(2):
        assert CliRunner().invoke(app, ["schema", str(recipe)]).exit_code == 0
    first, rest = recipe.read_text().split("\n", 1)
    url = first.removeprefix("# yaml-language-server: $schema=")
    assert json.loads(Path(url2pathname(urlsplit(url).path)).read_text()) == json_schema()
    assert urlsplit(url).scheme == "file"
    assert rest == original.split("\n", 1)[1]


def test_the_line_for_editors_is_written_into_recipes_only(tmp_path: Path) -> None:
    note = tmp_path / "note.txt"
    note.write_text("no recipe")
    result = CliRunner().invoke(app, ["schema", str(note)])
    assert result.exit_code == 2 and note.read_text() == "no recipe"
