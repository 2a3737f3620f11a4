"""`apertus branch` and `lineage`: what they write, and what they ask for."""

from __future__ import annotations

from pathlib import Path

from flows.planning.plan import Plan
from tests.flows.finished import invoke


def test_branch_from_the_command_line_writes_the_file_and_says_what_is_shared(
    done: Plan, recipe: Path
) -> None:
    result = invoke("branch", str(recipe), "pretrain@step=12", "--name", "other", "--store", done.store.url)
    assert result.exit_code == 0, result.output
    assert (
        "7 parts are shared with" in result.output
        and "4 are new: other, cooldown, evaluate, export" in result.output
    )
    assert recipe.with_name("other.yaml").exists()
    assert (
        "is already in"
        in invoke(
            "branch", str(recipe), "pretrain@step=12", "--name", "other", "--store", done.store.url
        ).output
    )


def test_a_branch_is_written_where_there_is_a_folder_and_says_how_it_was_made(
    done: Plan, recipe: Path, tmp_path: Path
) -> None:
    target, nowhere = tmp_path / "there.yaml", tmp_path / "none" / "x.yaml"
    options = (
        "branch",
        str(recipe),
        "pretrain@step=12",
        "--name",
        "other",
        "--store",
        done.store.url,
        "--output",
    )
    result = invoke(*options, str(nowhere))
    assert (
        result.exit_code,
        f"there is no folder '{nowhere.parent}'" in result.output.replace("\n", ""),
    ) == (2, True), result.output
    assert invoke(*options, str(target)).exit_code == 0
    assert (
        f"#   apertus branch {recipe} pretrain@step=12 --name other --output {target}\n" in target.read_text()
    )


def test_a_stage_of_a_stored_run_is_not_looked_for_in_a_file(done: Plan) -> None:
    result = invoke("lineage", "tiny", "export", "--store", done.store.url)
    assert result.exit_code == 2
    assert "for a run, name a part: tiny:export." in result.output
    assert invoke("lineage", "tiny:export", "--store", done.store.url).exit_code == 0
