"""The files that commands write for people: their endings, and what they never replace."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import get_type_hints

import pytest
from typer.models import OptionInfo

from flows.cli.__main__ import app
from flows.cli.output import BEGINNINGS, write
from flows.planning.plan import Plan, make
from infra.store import Store
from specs.errors import StageError
from specs.recipe import load
from tests.flows.finished import invoke
from tests.recipes import RECIPE, write_recipe

WRITERS = {  # by command and option: the other arguments, with {} for the recipe
    ("metrics", "--output"): ["{}"],
    ("report", "--output"): ["{}"],
    ("inspect", "--html"): ["{}", "main"],
    ("rehearse", "--report"): ["{}", "pretrain"],
    ("schema", "--output"): [],
    ("lineage", "--picture"): ["{}", "export"],
    ("branch", "--output"): ["{}", "pretrain@step=8", "--name", "slower"],
}


def options() -> Iterator[tuple[str, str]]:
    """Every command with an option that is a path, and the option."""
    for command in app.registered_commands:
        assert command.callback is not None
        for parameter, hint in get_type_hints(command.callback, include_extras=True).items():
            if "Path" in str(hint):
                option = next((one for one in hint.__metadata__ if isinstance(one, OptionInfo)), None)
                if option is None:  # an argument, which is read
                    continue
                # typer keeps the first name as the default
                name = option.default if isinstance(option.default, str) else f"--{parameter}"
                yield command.name or command.callback.__name__, name


def written(command: str, option: str, recipe: Path, target: str | Path, *more: str) -> str:
    """The output of a command that is refused."""
    arguments = [argument.format(recipe) for argument in WRITERS[command, option]]
    result = invoke(command, *arguments, option, str(target), *more)
    assert result.exit_code == 2, (command, result.output)
    assert "unexpected" not in result.output
    return result.output


def test_every_option_that_names_a_file_to_write_is_tried_here() -> None:
    assert {*options()} == WRITERS.keys()


@pytest.mark.parametrize(("command", "option"), WRITERS)
def test_a_recipe_is_never_overwritten(command: str, option: str, recipe: Path, store: Store) -> None:
    text = recipe.read_text()
    there = sorted(recipe.parent.iterdir())
    written(command, option, recipe, recipe)
    for ending in [*BEGINNINGS, ".yaml"]:  # whatever it is called
        other = recipe.with_name(f"recipe{ending}")
        shutil.copy(recipe, other)
        written(command, option, other, other, *([] if command == "schema" else ["--store", store.url]))
        assert other.read_text() == text
        other.unlink()
    assert recipe.read_text() == text
    assert sorted(recipe.parent.iterdir()) == there


@pytest.mark.parametrize(("command", "option"), WRITERS)
@pytest.mark.parametrize(
    "target", ["", ".", "..", "{}", "{}/rows", "{}/rows.txt", "{}/rows.csv.gz", "{}/no/x"]
)
def test_a_name_without_the_right_ending_is_refused_with_a_name_that_has_it(
    command: str, option: str, target: str, recipe: Path
) -> None:
    assert "Fix: name it " in written(command, option, recipe, target.format(recipe.parent))


@pytest.mark.parametrize(("command", "option"), WRITERS)
def test_a_folder_that_is_missing_is_named(command: str, option: str, recipe: Path) -> None:
    name = written(command, option, recipe, "").rstrip().rpartition("Fix: name it ")[2]
    folder = recipe.parent / "missing"
    assert f"there is no folder '{folder}'" in written(command, option, recipe, folder / name)


def test_what_a_command_wrote_it_replaces_and_nothing_else(done: Plan, recipe: Path, tmp_path: Path) -> None:
    for command, option, ending in (
        *(("metrics", "--output", ending) for ending in (".csv", ".jsonl", ".parquet")),
        ("report", "--output", ".html"),
        ("inspect", "--html", ".html"),
        ("schema", "--output", ".json"),
        ("lineage", "--picture", ".svg"),
    ):
        target = tmp_path / f"made{ending}"
        target.write_text("")  # nothing is lost with an empty file
        arguments = [argument.format(recipe) for argument in WRITERS[command, option]]
        if command != "schema":
            arguments += ["--store", done.store.url]
        result = invoke(command, *arguments, option, str(target))
        assert result.exit_code == 0, result.output
        content = target.read_bytes()
        write(target, content + b"\n")
        assert content and target.read_bytes() == content + b"\n"
        target.write_text("notes of somebody\n")
        result = invoke(command, *arguments, option, str(target))
        assert result.exit_code == 2 and "is not what this command writes" in result.output
        assert target.read_text() == "notes of somebody\n"
        target.unlink()


@pytest.mark.parametrize(("command", "option"), WRITERS)
def test_odd_names_are_messages(command: str, option: str, recipe: Path) -> None:
    ending = written(command, option, recipe, "").rstrip().rpartition("Fix: name it file")[2]
    loop, folder = recipe.parent / f"loop{ending}", recipe.parent / f"folder{ending}"
    loop.symlink_to(loop)
    folder.mkdir()
    for target in (f"a\0b{ending}", loop, folder, recipe.parent / ("x" * 300 + ending)):
        written(command, option, recipe, target)


@pytest.fixture
def pages(tmp_path: Path, store: Store) -> Plan:
    """A plan whose source is pages of HTML."""
    path = write_recipe(tmp_path, RECIPE.replace("*.txt", "*.html"))
    for note in (tmp_path / "documents").glob("*.txt"):
        note.with_suffix(".html").write_text(f"<!DOCTYPE html>\n{note.read_text()}")
    return make(load(path), store)


def test_a_file_of_a_source_or_of_the_store_is_never_replaced(pages: Plan, tmp_path: Path) -> None:
    page = "<!doctype html>\n"
    source, stored = tmp_path / "documents" / "note-03.html", Path(pages.store.root) / "reports" / "x.html"
    stored.parent.mkdir(parents=True)
    stored.write_text(page)
    link = tmp_path / "link.html"
    link.symlink_to(source)
    for target, reason in (
        (source, "is a file of the source 'notes'"),
        (link, "is a file of the source 'notes'"),
        (stored, "is in the store"),
    ):
        before = target.read_bytes()
        with pytest.raises(StageError, match=reason):
            write(target, page, pages)
        assert target.read_bytes() == before
    write(tmp_path / "documents" / "report.html", page, pages)


def test_a_link_stays_a_link_and_its_target_is_replaced(tmp_path: Path) -> None:
    target, link = tmp_path / "shared.html", tmp_path / "mine.html"
    target.write_text("<!DOCTYPE html>\nold")
    link.symlink_to(target)
    write(link, "<!doctype html>\nnew")
    assert link.is_symlink() and target.read_text() == "<!doctype html>\nnew"


def test_a_write_that_fails_leaves_the_file_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "schema.json"
    target.write_text(old := json.dumps({"$defs": {}}, indent=1))

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", no_space)
    with pytest.raises(OSError, match="No space left"):
        write(target, "{}")
    assert target.read_text() == old and list(tmp_path.iterdir()) == [target]
