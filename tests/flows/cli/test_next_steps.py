"""What is proposed after a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from flows.execution.runner import PipelineFailed
from flows.planning.plan import Plan
from specs.anomalies import Event
from tests.flows.conftest import finish
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


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_ends_with_a_remark_about_the_anomalies_of_each_part(
    planned: Callable[..., Plan], recipe: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    plan = planned()
    spike = asdict(Event(4, "grad_norm", 3.0, 47.0, 21.3, "report"))
    finish(plan, *(name for name in plan.graph.nodes if name not in ("cooldown", *["evaluate"] * fails)))
    finish(plan, "cooldown", facts={"anomalies": [spike]})

    def failed(*arguments: Any, **parameters: Any) -> None:
        raise PipelineFailed({"evaluate": "the gate is not met"})

    monkeypatch.setattr("flows.execution.server.start_prefect", lambda: None)
    monkeypatch.setattr("flows.execution.flow.run_here", failed)
    result = invoke("run", str(recipe), "--store", plan.store.url)
    assert result.exit_code == fails
    told, _, proposed = result.stdout.partition("Next:\n")
    assert told.splitlines()[-1] == (
        "note cooldown: 1 anomaly: step 4: the grad norm of 47 spikes above 21.3; training continues"
    )
    assert bool(proposed) != fails and told.count("note cooldown") == 1
