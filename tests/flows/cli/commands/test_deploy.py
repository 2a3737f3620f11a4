"""What is refused before a server is asked; `tests/e2e/test_deployment.py` has the rest."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli.__main__ import app


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "PREFECT_API_URL: no Prefect server is named. Fix: start one"),
        (["--until", "pretrian"], "--until: there is no stage 'pretrian'. Fix: did you mean 'pretrain'?"),
        (["--set", "stages.pretrain.budget=0 steps"], "stages.pretrain.budget"),
    ],
)
def test_a_mistake_is_refused_before_anything_is_registered(
    arguments: list[str], message: str, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    result = CliRunner().invoke(app, ["deploy", str(recipe), *arguments], env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert message in result.output
