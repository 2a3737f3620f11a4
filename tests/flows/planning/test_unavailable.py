"""Inputs that cannot be read while planning: where they lie, and the digest that stands in for theirs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flows.planning.parts import harness
from flows.planning.plan import Plan
from flows.planning.stage_choice import select
from flows.planning.unavailable import is_local, provisional
from specs.errors import SpecError
from specs.sources import SourceSpec


def test_the_provisional_digest_is_that_of_the_place_and_the_globs() -> None:
    source = SourceSpec(url="s3://bucket/a", format="text")
    digest = provisional(source)
    assert digest.startswith("declared:") and digest == provisional(source)
    assert digest == provisional(source.model_copy(update={"license": "CC0-1.0"}))
    for other in ({"url": "s3://bucket/b"}, {"include": ["*.txt"]}, {"exclude": ["b/*"]}):
        assert provisional(source.model_copy(update=other)) != digest


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("/data", True),
        ("relative/folder", True),
        ("file:///data", True),
        ("s3://bucket/a", False),
        ("hf://datasets/owner/name@main", False),
    ],
)
def test_only_files_of_this_machine_are_listed_without_the_network(url: str, local: bool) -> None:
    assert is_local(url) is local


def test_without_the_harness_plan_and_run_say_what_is_not_checked_and_the_command_that_installs_it(
    planned: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "installed_version", lambda: None)
    plan = planned(
        "stages.evaluate.harness={suites: {a: {tasks: [no-such-task]}}}",
        "stages.evaluate.gates=[{metric: a/no-such-task/acc, min: 1}]",
    )
    note = (
        "evaluate: lm-evaluation-harness is not installed, so tasks and metrics of the suites a are not"
        " checked; install it: pip install 'apertus[harness]'"
    )
    assert note in plan.graph.notes
    assert plan.steps["evaluate/harness/a"].unavailable == (harness.EXTRA,)
    with pytest.raises(SpecError) as refused:
        select(plan, None, None)
    assert str(refused.value).endswith(
        "harness.suites: 'lm-evaluation-harness' is unavailable (it is not installed); 'evaluate' cannot run."
        " Fix: pip install 'apertus[harness]'"
    )
