"""Names that nothing has: one mistake is one problem, at the place where it was made."""

from __future__ import annotations

from pathlib import Path

from tests.recipes import CHAT, edit, line_of, problems, write_recipe


def test_a_misspelt_stage_is_one_problem_and_not_one_for_each_stage_that_names_it_rightly(
    tmp_path: Path,
) -> None:
    path = edit(write_recipe(tmp_path), ("  cooldown:\n", "  cooldwn:\n"))
    assert problems(path) == (
        f"{path}:{line_of(path, 'cooldwn:')}: stages.cooldwn: nothing names stage 'cooldwn', and"
        " stages.evaluate.from, stages.export.from name 'cooldown'. Fix: call it 'cooldown', or correct these"
        " fields."
    )


def test_a_misspelt_source_is_one_problem(tmp_path: Path) -> None:
    path = edit(write_recipe(tmp_path), ("  notes: {url", "  ntes: {url"))
    assert problems(path) == (
        f"{path}:{line_of(path, 'ntes: {url')}: sources.ntes: nothing names source 'ntes', and"
        " stages.tokenizer.sources[0], stages.corpus.sources.notes name 'notes'. Fix: call it 'notes', or"
        " correct these fields."
    )


def test_a_name_that_is_wrong_in_one_field_is_reported_there(tmp_path: Path) -> None:
    path = edit(write_recipe(tmp_path, CHAT), ("conversations: chat\n", "conversations: chta\n"))
    where = f"{path}:{line_of(path, 'chta')}: stages.sft.conversations"
    assert problems(path).startswith(f"{where}.chta: there is no stage 'chta'. Fix: did you mean 'chat'?")


def test_a_wrong_field_of_a_source_is_one_problem_though_stages_name_the_source(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, CHAT)
    text = problems(path, "sources.notes.format=txt", "sources.questions.limit=none")
    assert text == (
        "--set sources.questions.limit=none: sources.questions.limit: 'none' is not a whole number. Fix:"
        " write a whole number, such as 100.\n"
        "--set sources.notes.format=txt: sources.notes.format: 'txt' is not one of the choices. Fix: did you"
        " mean 'text'?"
    )


def test_no_reference_is_wrong_because_all_sources_or_stages_are(tmp_path: Path) -> None:
    for group in ("sources", "stages"):
        text = problems(write_recipe(tmp_path), f"{group}=3")
        assert text == (
            f"--set {group}=3: {group}: 3 is not a mapping. Fix: write names and values, such as"
            " {name: value}."
        )
