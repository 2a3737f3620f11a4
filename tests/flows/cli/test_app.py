"""What every command prints: of what was chosen alone, and as it is written."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli.__main__ import app
from flows.planning.plan import Plan
from specs.redaction import redacted
from tests.flows.cli.printing import ODD
from tests.flows.conftest import finish

Planned = Callable[..., Plan]


@pytest.mark.parametrize(
    ("until", "text"),
    [
        ([], "All 10 parts of tiny are finished"),
        (["--until", "main"], "The chosen parts (3 of 10) of tiny are finished"),
    ],
)
def test_a_finished_run_counts_what_was_chosen(
    planned: Planned, recipe: Path, until: list[str], text: str
) -> None:
    finish(planned())
    result = CliRunner().invoke(app, ["run", str(recipe), "--store", planned().store.url, *until])
    assert text in result.output


@pytest.mark.parametrize("text", ODD)
def test_what_a_recipe_says_is_printed_as_it_is_written(recipe: Path, tmp_path: Path, text: str) -> None:
    store, name = tmp_path / text.replace("/", "-"), text.replace("/", "-")
    quoted = text.replace("\\", "\\\\")
    recipe.write_text(recipe.read_text().replace("sources:\n", f'description: "{quoted}"\nsources:\n', 1))
    overrides = ["--set", f"sources.notes.license='{text}'", "--set", "stages.pretrain.validation.interval=0"]

    def output(*arguments: str) -> str:
        result = CliRunner().invoke(app, [*arguments, "--store", str(store)], env={"COLUMNS": "300"})
        return "".join(result.output.split("\n"))

    assert text in output("plan", str(recipe), *overrides)
    assert str(store) in output("status", str(recipe), *overrides)
    assert text in output("lineage", str(recipe), "export", *overrides)
    assert f"there is no stage '{name}'" in output(
        "plan", str(recipe), "--set", f"stages.export.after=['{name}']"
    )
    renamed = recipe.with_name("renamed.yaml")
    renamed.write_text(recipe.read_text().replace("  notes: {", f'  "{quoted}": {{', 1))
    assert f"sources.{text}" in output("plan", str(renamed))


def test_a_user_without_a_home_folder_is_told_to_set_one(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(user: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {user}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.delenv("HOME")
    result = CliRunner().invoke(app, ["plan", str(recipe)])
    told = f"user {os.getuid()} has no home folder: HOME is not set, and passwd has no such user."
    assert result.exit_code == 2
    assert result.output == f"error: {told} Fix: set HOME to a folder that the user can write\n"
    assert redacted("text") == "text"


@pytest.mark.parametrize(
    ("variable", "form"),
    [
        *(("APERTUS_PROFILE", form) for form in ("{}", "{}/below")),
        *(("APERTUS_STORE", form) for form in ("{}", "{}/below", "file://{}", "nowhere://x")),
        *(("APERTUS_SCRATCH", form) for form in ("{}", "{}/below")),
    ],
)
def test_a_mistake_in_a_variable_of_the_environment_names_the_variable_before_anything_runs(
    recipe: Path, tmp_path: Path, variable: str, form: str
) -> None:
    (tmp_path / "file").write_text("- a")
    wrong = form.format(tmp_path / "file")
    environment = {"APERTUS_STORE": str(tmp_path / "store"), variable: wrong, "COLUMNS": "400"}
    result = CliRunner().invoke(app, ["run", str(recipe)], env=environment)
    assert result.exit_code == 2, result.output
    assert wrong.removeprefix("file://") in result.output and f"({variable} names it)" in result.output
    assert not list((tmp_path / "store").glob("tokenizer/*"))
