"""What is proposed after a run."""

from __future__ import annotations

from pathlib import Path

from flows.planning.plan import Plan
from tests.flows.finished import invoke


def test_what_is_proposed_after_a_run_is_about_the_same_store_and_the_same_recipe(
    done: Plan, recipe: Path
) -> None:
    result = invoke(
        "run",
        str(recipe),
        "--store",
        done.store.url,
        "--set",
        "stages.pretrain.checkpoint={interval: 7}",
        "--name",
        "own",
    )
    options = f"--store {done.store.url} --set 'stages.pretrain.checkpoint={{interval: 7}}' --set name=own"
    proposed = [
        line.partition("apertus ")[2] or line for line in result.output.partition("Next:\n")[2].splitlines()
    ]
    assert [
        line[line.index(command) :]
        for line, command in zip(proposed, ("status", "lineage", "plan"), strict=True)
    ] == [
        f"status {recipe} {options}",
        f"lineage {recipe} export {options}",
        f"plan {recipe} {options} --set stages.cooldown.optimizer.lr=0.005",
    ]
