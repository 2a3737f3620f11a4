from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli.__main__ import app
from tests.flows.inspection.test_first_recipe import WRITERS


def _init(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["init", *arguments], env={"COLUMNS": "300"})
    return result.exit_code, result.output


def test_what_was_found_and_what_comes_next_is_printed(tmp_path: Path) -> None:
    for kind in ("text", "chats", "unknown"):
        WRITERS[kind](tmp_path)
    code, printed = _init(str(tmp_path))
    assert code == 0
    assert "texts: 4 files, 9.92kB, format text\n" in printed
    assert "chats: 1 file, " in printed and "left out: 1 of .png, of no known format\n" in printed
    assert f"apertus run {tmp_path}/recipe.yaml" in printed
    assert (tmp_path / "recipe.yaml").read_text().startswith("# yaml-language-server: $schema=file://")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["nowhere"], "'nowhere' is no folder"), ([], "exists, and nothing is overwritten")],
)
def test_a_folder_that_is_none_and_a_recipe_that_exists_are_refused(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    WRITERS["text"](tmp_path)
    (tmp_path / "recipe.yaml").write_text("mine")
    code, printed = _init(*(arguments or [str(tmp_path)]))
    assert code == 2 and message in printed
    assert (tmp_path / "recipe.yaml").read_text() == "mine"
