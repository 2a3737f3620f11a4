"""Plans of the kinds behind pretraining: which parts there are, what they share, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flows.planning.graph import Node
from flows.planning.plan import Plan, make
from infra.store import Attempt, Store
from specs.errors import SpecError
from specs.recipe import load
from specs.stages.evaluate import EvaluatePart
from specs.stages.export import ExportPart
from specs.stages.training import Segment
from tests.flows.conftest import finish, job_of
from tests.infra.sealed import sealed
from tests.recipes import CHAT, write_recipe

Planned = Callable[..., Plan]


@pytest.fixture
def chat(tmp_path: Path, store: Store) -> Planned:
    """The tiny recipe with everything behind it, and overrides."""
    path = write_recipe(tmp_path, CHAT)
    return lambda *overrides: make(load(path, overrides), store)


def fingerprints(plan: Plan) -> dict[str, str]:
    return {name: node.fingerprint for name, node in plan.graph.nodes.items()}


def changed(before: Plan, after: Plan) -> set[str]:
    old, new = fingerprints(before), fingerprints(after)
    return {name for name in old if old[name] != new.get(name)}


def segment(plan: Plan, name: str) -> Segment:
    part = plan.graph.nodes[name].part
    assert isinstance(part, Segment)
    return part


def test_a_step_of_long_context_has_length_base_and_steps_of_its_own(chat: Planned) -> None:
    first, second = segment(chat(), "longer/1"), segment(chat(), "longer/2")
    assert (first.sequence_length, first.model.rope_theta, first.start_step, first.end_step) == (64, 1e6, 0, 4)
    assert (second.sequence_length, second.model.rope_theta, second.start_step, second.end_step) == (128, 2e6, 0, 3)
    assert first.schedule.warmup_tokens == 2 * 4 * 64
    assert first.carry == second.carry == ["weights", "data"]
    plan = chat()
    assert plan.graph.nodes["longer/2"].inputs["parent"].node == "longer/1"
    assert plan.graph.nodes["sft"].inputs["parent"].node == "longer/2"
    assert segment(plan, "sft").sequence_length == 128
    assert segment(plan, "sft").model.rope_theta == 2e6


def test_the_second_step_can_change_without_the_first(chat: Planned) -> None:
    after = changed(chat(), chat("stages.longer.steps.1.rope_theta=4e6"))
    assert "longer/2" in after and "sft" in after
    assert not {"longer/1", "cooldown", "chat/questions"} & after


def test_a_stage_may_start_from_one_step(chat: Planned) -> None:
    plan = chat("stages.sft.from=longer/1@step=2")
    assert (plan.graph.nodes["sft"].inputs["parent"].node, plan.graph.nodes["sft"].inputs["parent"].step) == ("longer/1", 2)
    assert 2 in segment(plan, "longer/1").checkpoint.milestones
    with pytest.raises(SpecError, match=r"long_context 'longer' has no part '3'|'longer' has no part '3'"):
        chat("stages.sft.from=longer/3")


def test_a_changed_reward_samples_nothing_again(chat: Planned) -> None:
    after = changed(chat(), chat("stages.preferences.reward=grounded-answer"))
    kept = {"preferences/prompts", "preferences/model", "preferences/completions", "sft", "evaluate-sft"}
    assert not kept & after
    assert {"preferences/rewards", "preferences/pairs", "preferences/log_probabilities", "qrpo", "dpo"} <= after


def test_a_changed_choice_scores_nothing_again(chat: Planned) -> None:
    after = changed(chat(), chat("stages.preferences.pairs=2"))
    assert "preferences/rewards" not in after and "preferences/pairs" in after


def test_how_work_is_divided_changes_no_fingerprint(chat: Planned) -> None:
    assert not changed(chat(), chat("stages.preferences.prompts_per_unit=3", "stages.chat.files_per_task=1"))


def test_what_two_stages_need_alike_is_made_once(chat: Planned) -> None:
    graph = chat("stages.chat-model.from=sft", "stages.chat-model.evaluations=[]").graph
    assert graph.nodes["preferences/model"].fingerprint == graph.nodes["chat-model"].fingerprint
    assert graph.nodes["preferences/model"].fingerprint == graph.nodes["evaluate-sft/model"].fingerprint
    assert graph.duplicate_of(graph.nodes["evaluate-sft/prompts"]) is None
    assert graph.duplicate_of(graph.nodes["evaluate-qrpo/prompts"]) == "evaluate-sft/prompts"
    totals = chat().to_json()["totals"]["to_do"]
    assert totals["parts"] == len({(node.path, node.end_step) for node in chat().graph.nodes.values()}) < len(chat().graph.nodes)
    assert graph.nodes["evaluate-sft/prompts"].fingerprint == graph.nodes["evaluate-qrpo/prompts"].fingerprint
    assert graph.nodes["evaluate-sft/completions"].fingerprint != graph.nodes["evaluate-qrpo/completions"].fingerprint


def test_the_model_of_a_conversation_ends_turns(chat: Planned) -> None:
    parts = {name: node.part for name, node in chat().graph.nodes.items() if isinstance(node.part, ExportPart)}
    assert {name: part.chat for name, part in parts.items()} == {
        "export": False,
        "preferences/model": True,
        "evaluate-sft/model": True,
        "evaluate-qrpo/model": True,
        "chat-model": True,
    }


def test_the_context_is_the_longest_on_the_way_and_forgetting_is_measured_on_the_same_text(chat: Planned) -> None:
    plan = chat("stages.sft.sequence_length=64", "stages.preferences.max_tokens=32", "stages.evaluate-sft.sequence_length=48")
    parts = {name: node.part for name, node in plan.graph.nodes.items()}
    assert segment(plan, "qrpo").sequence_length == 64
    assert isinstance(parts["chat-model"], ExportPart) and parts["chat-model"].sequence_length == 128
    assert isinstance(parts["evaluate-qrpo"], EvaluatePart) and parts["evaluate-qrpo"].sequence_length == 48
    with pytest.raises(SpecError, match=r"evaluate-qrpo.samples: 'evaluate-sft' has samples 3, this stage 64; .* Fix: state samples: 3"):
        chat("stages.evaluate-sft.samples=3")


def test_the_order_of_a_merge_does_not_matter(chat: Planned) -> None:
    weighted = chat("stages.merged.weights=[3, 1]")
    turned = chat("stages.merged.checkpoints=[dpo, qrpo]", "stages.merged.weights=[1, 3]")
    assert not changed(weighted, turned)
    assert "merged" in changed(chat(), weighted)
    assert chat().graph.nodes["merged"].end_step == 1


def test_a_merge_carries_no_optimizer(chat: Planned) -> None:
    again = ["stages.again.kind=cooldown", "stages.again.from=merged"]
    with pytest.raises(SpecError, match="there is no stage 'again'"):
        chat(*again)
    with pytest.raises(
        SpecError, match=r"carry: 'merged' is a merge, which has no optimizer states to carry. Fix: state carry: \[weights\]"
    ):
        chat("stages.cooldown.from=merged", "stages.longer.from=pretrain")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "stages.qrpo.from=longer",
            r"stages\.qrpo\.from: 'preferences' was made with step 8 of 'sft', but this stage starts from 'longer'",
        ),
        ("stages.qrpo.sequence_length=64", r"'preferences' has sequence_length 128, this stage 64. Fix: state sequence_length: 128"),
        ("stages.dpo.precision.param=bfloat16", r"are in float32, this stage computes in bfloat16"),
        ("stages.preferences.max_tokens=100", r"two completions of 100 tokens do not fit into a sequence of 128. Fix: lower it to 64"),
        ("stages.evaluate-qrpo.generation.sampling.seed=1", r"'evaluate-sft' and this stage differ in prompts or sampling"),
        ("stages.preferences.reward=best-answer", r"there is no reward 'best-answer'; use one of grounded-answer"),
        ('stages.preferences.reward={function: "my.module:reward"}', r"reward my.module:reward states no version"),
        ("stages.sft.conversations=corpus/notes", r"stage 'corpus' is a corpus; conversations is needed here"),
        ("stages.chat.sources.notes.holdout=0.1", r"source 'notes' has format text; a conversations needs chat, conversations"),
        ("stages.qrpo.optimizer={}", r"stages\.qrpo\.optimizer\.lr: the learning rate has decayed to 0 at step 8 of 'sft'"),
        ("stages.longer.steps.0.carry=[data]", r"carries its weights; add weights to carry"),
        ("stages.qrpo.launch={processes: 2, parallel: {pp: 2}}", r"cannot run in a pipeline \(pp 2\): its loss needs the whole sequences"),
    ],
)
def test_what_does_not_fit_together_is_refused_with_the_reason(chat: Planned, override: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        chat(override)


def commit_validated(plan: Plan, node: Node, losses: dict[int, float]) -> None:
    """Finishes a training part whose checkpoints were validated."""
    attempt = Attempt(job_of(plan, node), plan.store)
    attempt.begin()
    for step, loss in losses.items():
        plan.store.write_once(f"{attempt.folder(Attempt.checkpoint_folder(step))}/weights", b"weights")
        facts = {"tokens": 0, "validation": {"chat": loss}, "validation_step": step}
        attempt.commit_checkpoint(step, facts, files=sealed(attempt, step))
    attempt.commit(metrics={}, step=max(losses))


def test_the_best_checkpoint_is_known_when_its_stage_has_finished(chat: Planned) -> None:
    overrides = ["stages.preferences.from=sft@best:val_loss", "stages.qrpo.from=sft@best:val_loss", "stages.dpo.from=sft@best:val_loss"]
    before = chat(*overrides)
    assert before.graph.nodes["qrpo"].inputs["parent"].step == 8
    assert any("'sft@best:val_loss' is known when 'sft' has finished" in note for note in before.graph.notes)
    assert segment(before, "sft").checkpoint.best == ["val_loss"]
    commit_validated(before, before.graph.nodes["sft"], {2: 3.0, 4: 2.5, 6: 2.4, 8: 2.6})
    after = chat(*overrides)
    assert after.graph.nodes["qrpo"].inputs["parent"].step == 6
    assert after.graph.nodes["preferences/log_probabilities"].inputs["checkpoint"].step == 6
    assert after.graph.nodes["sft"].fingerprint == before.graph.nodes["sft"].fingerprint
    assert not after.graph.notes


def test_choosing_by_held_out_loss_needs_one(chat: Planned) -> None:
    with pytest.raises(SpecError, match=r"'sft' measures none. Fix: give it a validation.interval"):
        chat("stages.evaluate-sft.from=sft@best:val_loss", "stages.sft.validation.interval=0")


def test_a_finished_pipeline_is_reused_whole(chat: Planned) -> None:
    finish(chat())
    assert {step.action for step in chat().steps.values()} == {"reuse"}
