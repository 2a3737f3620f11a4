"""Runs are copied into another store, whole or stage by stage."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.planning.plan import Plan, make
from infra.store import Store, runs
from infra.store.maintenance.garbage import survey
from specs.recipe import load
from tests.flows.finished import invoke


@pytest.mark.parametrize("by_name", [True, False])
def test_a_copied_run_is_reused_and_resumes_in_its_new_store(
    done: Plan, recipe: Path, tmp_path: Path, by_name: bool
) -> None:
    target = str(tmp_path / "target")
    copied = invoke("cp", "tiny" if by_name else str(recipe), target, "--store", done.store.url)
    assert copied.exit_code == 0, copied.output
    there = Store.open(target)
    plan = make(load(recipe), there)
    assert {step.action for step in plan.steps.values()} == {"reuse"}
    longer = make(load(recipe, ["stages.pretrain.budget=30 steps"]), there).steps["pretrain/3"]
    assert (longer.action, longer.resume_step) == ("resume", 16)
    assert survey(there, grace=0.0).items == []  # it is a named run of the target
    again = invoke("cp", "tiny" if by_name else str(recipe), target, "--store", done.store.url)
    assert " 0 files " in again.output
    assert len(runs.stamps(there, "tiny")) == 1


def test_some_stages_are_copied_with_what_they_were_made_from(
    done: Plan, recipe: Path, tmp_path: Path
) -> None:
    for what in ("tiny", str(recipe)):
        target = str(tmp_path / f"target-{Path(what).stem}-{len(what)}")
        assert invoke("cp", what, target, "--stages", "pretrain", "--store", done.store.url).exit_code == 0
        actions = {name: step.action for name, step in make(load(recipe), Store.open(target)).steps.items()}
        assert actions == dict.fromkeys(
            ["tokenizer", "corpus/notes", "main", "second", "pretrain/1", "pretrain/2", "pretrain/3"], "reuse"
        ) | dict.fromkeys(["cooldown", "evaluate", "export"], "run")


@pytest.mark.parametrize("by_name", [True, False])
def test_a_copy_of_some_stages_leaves_a_run_of_the_target_whole(
    done: Plan, recipe: Path, tmp_path: Path, by_name: bool
) -> None:
    what, target = "tiny" if by_name else str(recipe), str(tmp_path / "target")
    assert invoke("cp", what, target, "--store", done.store.url).exit_code == 0
    there = Store.open(target)
    before = runs.last(there, "tiny").parts
    # an earlier step of what the target has
    shorter = () if by_name else ("--set", "stages.pretrain.budget=14 steps")
    assert (
        invoke("cp", what, target, "--stages", "pretrain", "--store", done.store.url, *shorter).exit_code == 0
    )
    assert (runs.last(there, "tiny").parts, len(runs.stamps(there, "tiny"))) == (before, 1)
    assert survey(there, grace=0.0).items == []


def test_copies_of_stages_one_after_the_other_add_up(done: Plan, tmp_path: Path) -> None:
    target = str(tmp_path / "target")
    for stage in ("second", "cooldown", "tokenizer"):
        assert invoke("cp", "tiny", target, "--stages", stage, "--store", done.store.url).exit_code == 0
    there = Store.open(target)
    assert set(runs.last(there, "tiny").parts) == {"second", "cooldown", "tokenizer"}
    assert {item.why for item in survey(there, grace=0.0).items} == set()


def test_a_copy_that_cannot_be_is_a_message(done: Plan, recipe: Path, tmp_path: Path) -> None:
    for arguments, message in (
        (("nothing", str(tmp_path / "t")), "there is no run 'nothing'"),
        (("tiny", done.store.url), "source and target are the same store"),
        (("tiny", str(tmp_path / "t"), "--stages", "pretrian"), "run 'tiny' has no stage 'pretrian'"),
        (
            (str(recipe), str(tmp_path / "t"), "--stages", "pretrian"),
            "--stages: there is no stage 'pretrian'",
        ),
    ):
        result = invoke("cp", *arguments, "--store", done.store.url)
        assert (result.exit_code, message in result.output) == (2, True), result.output
