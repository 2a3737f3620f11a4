"""Parts of evaluations, selections and exports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flows.planning.plan import Plan, make
from infra.store import Store
from specs.errors import SpecError
from specs.recipe import load
from specs.stages.evaluate import EvaluatePart
from specs.stages.export import ExportPart
from tests.flows.comparing import segment
from tests.recipes import CHAT, write_recipe

Planned = Callable[..., Plan]


def test_the_context_is_the_longest_on_the_way_and_forgetting_is_measured_on_the_same_text(
    chat: Planned,
) -> None:
    plan = chat(
        "stages.sft.sequence_length=64",
        "stages.preferences.max_tokens=32",
        "stages.evaluate-sft.sequence_length=48",
    )
    parts = {name: node.part for name, node in plan.graph.nodes.items()}
    assert segment(plan, "qrpo").sequence_length == 64
    assert isinstance(parts["chat-model"], ExportPart) and parts["chat-model"].sequence_length == 128
    assert isinstance(parts["evaluate-qrpo"], EvaluatePart) and parts["evaluate-qrpo"].sequence_length == 48
    with pytest.raises(
        SpecError,
        match=r"evaluate-qrpo.samples: 'evaluate-sft' has samples 3, this stage 64; .* Fix: set samples: 3",
    ):
        chat("stages.evaluate-sft.samples=3")


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (
            "checkpoints: [sft, dpo], metric: val_loss/nothing",
            r"best.metric: 'val_loss/nothing' is the held-out loss of 'nothing'",
        ),
        (
            "checkpoints: [sft, merged]",
            r"best.checkpoints\[1\]: 'merged' was not trained, so it has no held-out loss",
        ),
        (
            "checkpoints: [sft, sft@step=3]",
            r"best.checkpoints\[1\]: 'sft@step=3' is step 3, but held-out loss is measured every 2 ",
        ),
    ],
)
def test_a_choice_by_a_loss_that_is_not_measured_is_refused(
    tmp_path: Path, store: Store, choice: str, message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        make(load(write_recipe(tmp_path, CHAT + f"  best: {{{{kind: select, {choice}}}}}\n")), store)


def test_a_choice_by_a_metric_that_a_candidate_will_not_have_is_refused(tmp_path: Path, store: Store) -> None:
    choice = (
        "  best: {{kind: select, evaluations: [evaluate-sft, evaluate-qrpo], metric: reward/difference}}\n"
    )
    with pytest.raises(
        SpecError, match=r"best\.metric: 'evaluate-sft' will not have a metric 'reward/difference'"
    ):
        make(load(write_recipe(tmp_path, CHAT + choice)), store)


def test_every_metric_of_an_evaluation_may_have_a_gate(chat: Planned) -> None:
    # what evaluate-qrpo of the tiny recipe stores: held-out text, answers and rewards, all of them against
    # evaluate-sft
    measured = [
        "perplexity",
        "perplexity/corpus/notes",
        "forgetting",
        "forgetting/corpus/notes",
        "kl/against",
        "reward/prompts",
    ]
    measured += [
        "reward/finished",
        "reward/mean",
        "reward/best/1",
        "reward/majority/1",
        "answers/seconds",
        "reward/against",
        "reward/difference",
        "reward/difference/low",
        "reward/difference/high",
    ]
    gates = ", ".join(f"{{metric: {name}, min: 0}}" for name in [*measured, "reward/wins"])
    chat(f"stages.evaluate-qrpo.gates=[{gates}]")
    several = (
        "stages.evaluate-qrpo.gates=[{metric: reward/best/4, min: 0}, {metric: reward/majority/2, min: 0}]"
    )
    both = [f"stages.{name}.generation.sampling.n=4" for name in ("evaluate-sft", "evaluate-qrpo")]
    chat(several, *both)
    with pytest.raises(SpecError, match="reward/best/4"):
        chat(several)
    chat(
        "stages.evaluate.gates=[{metric: loss/position/12, max: 9},"
        " {metric: own/stdlib_functions/acc, min: 0}]",
        "stages.evaluate.by_position={sequence_length: 50, buckets: 4}",
        "stages.evaluate.harness.include=installed:examples/tasks",
        "stages.evaluate.harness.suites={own: {tasks: [stdlib_functions]}}",
    )
