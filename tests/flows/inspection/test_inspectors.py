"""`apertus inspect`: what is shown is what the model reads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.cli.__main__ import app
from flows.inspection.inspectors import INSPECTORS
from flows.planning.plan import Plan, make
from infra.store import Store
from specs.errors import SpecError
from tests.flows.inspection.looking import OVERRIDES, look


def test_what_is_not_there_is_said_with_the_way_to_it(built: Plan, tmp_path: Path) -> None:
    empty = make(built.pipeline, Store.open(str(tmp_path / "empty")))
    with pytest.raises(SpecError, match=r"'main' has not been made yet"):
        look(empty, "main")
    with pytest.raises(SpecError, match=r"'main' has not been made yet"):
        look(empty, "cooldown")
    with pytest.raises(SpecError, match=r"'preferences/pairs' has not been made yet"):
        look(built, "qrpo")
    with pytest.raises(SpecError, match=r"no stage 'mian'\. Fix: did you mean 'main'"):
        look(built, "mian")
    with pytest.raises(SpecError, match=r"nothing to inspect in an export"):
        look(built, "export")
    with pytest.raises(SpecError, match=r"'pretrain' has no step 17\. Fix: name one from 1 to 16"):
        look(built, "pretrain", step=17)
    with pytest.raises(SpecError, match=r"name one: longer/1, longer/2"):
        look(built, "longer")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("main", {"step": 3}, r"--step applies to a training stage; 'main' is a mixture"),
        ("corpus/notes", {"sample": 3}, r"--sample applies to a training stage; 'corpus/notes' is a corpus"),
        ("pretrain", {"reason": "kept"}, r"--reason applies to a corpus; 'pretrain' is a pretrain"),
        ("main", {"document": "a"}, r"--document applies to a corpus; 'main' is a mixture"),
        (
            "pretrain",
            {"step": 1, "sample": 0},
            r"--step shows the samples of a step, --sample one by its index",
        ),
    ],
)
def test_an_option_that_would_be_ignored_is_refused(
    built: Plan, name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        look(built, name, **options)


def test_the_command_prints_json_and_writes_a_page(built: Plan, tmp_path: Path) -> None:
    recipe = next(Path(built.store.root).parent.glob("*.yaml"))
    options = [
        str(recipe),
        "cooldown",
        "--store",
        built.store.url,
        *(part for override in OVERRIDES for part in ("--set", override)),
    ]
    printed = CliRunner().invoke(app, ["inspect", *options, "--step", "1", "--json"])
    assert printed.exit_code == 0, printed.output
    assert json.loads(printed.output)["step"] == 1
    page = tmp_path / "batch.html"
    written = CliRunner().invoke(app, ["inspect", *options, "--html", str(page)])
    assert written.exit_code == 0, written.output
    assert "</html>" in page.read_text()
    assert "quick" in page.read_text()


def test_looking_at_data_needs_no_torch() -> None:
    program = (
        "import sys; import flows.inspection.inspectors, apertus_model.stages.training_data,"
        " apertus_model.data.tokens.best_fit;"
        " assert not {'torch', 'torchtitan', 'prefect'} & set(sys.modules); print('light')"
    )
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "light\n", done.stderr


def test_every_kind_of_training_has_an_inspector() -> None:
    from specs.stages import TRAINING

    assert {"mixture", *TRAINING} <= set(INSPECTORS)
