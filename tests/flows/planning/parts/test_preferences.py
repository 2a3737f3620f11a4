"""Parts of preference data: what is made again after a change, and which model completes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flows.planning.plan import Plan
from specs.errors import SpecError
from specs.stages.export import ExportPart
from tests.flows.comparing import changed

Planned = Callable[..., Plan]


def test_a_changed_reward_samples_nothing_again(chat: Planned) -> None:
    after = changed(chat(), chat("stages.preferences.reward=grounded-answer"))
    kept = {"preferences/prompts", "preferences/model", "preferences/completions", "sft", "evaluate-sft"}
    assert not kept & after
    assert {
        "preferences/rewards",
        "preferences/pairs",
        "preferences/log_probabilities",
        "qrpo",
        "dpo",
    } <= after


def test_a_changed_choice_scores_nothing_again(chat: Planned) -> None:
    after = changed(chat(), chat("stages.preferences.pairs=2"))
    assert "preferences/rewards" not in after and "preferences/pairs" in after


def test_how_work_is_divided_changes_no_fingerprint(chat: Planned) -> None:
    assert not changed(chat(), chat("stages.preferences.prompts_per_unit=3", "stages.chat.files_per_task=1"))


def test_the_model_of_a_conversation_ends_turns(chat: Planned) -> None:
    parts = {
        name: node.part for name, node in chat().graph.nodes.items() if isinstance(node.part, ExportPart)
    }
    assert {name: part.chat for name, part in parts.items()} == {
        "export": False,
        "preferences/model": True,
        "evaluate-sft/model": True,
        "evaluate-qrpo/model": True,
        "chat-model": True,
    }


@pytest.fixture
def judged(chat: Planned, tmp_path: Path) -> Planned:
    """The same with a judge as the reward: `judged(text, ...)` with the text of its constitution, and
    overrides."""

    def plan(constitution: str, *overrides: str) -> Plan:
        (tmp_path / "constitution.md").write_text(constitution)
        judge = f"{{from: sft, constitution: {tmp_path / 'constitution.md'}}}"
        reward = f"stages.preferences.reward={{judge: {judge}, max_tokens: 128}}"
        return chat(reward, *overrides)

    return plan


def test_another_constitution_is_another_reward_and_samples_nothing_again(judged: Planned) -> None:
    before = judged("1. Be kind.")
    rewards = before.graph.nodes["preferences/rewards"]
    assert set(rewards.inputs) == {"prompts", "completions", "tokenizer", "judge", "constitution"}
    after = changed(before, judged("1. Be brief."))
    assert {"preferences/rewards", "preferences/pairs", "qrpo"} <= after
    assert not {"preferences/completions", "preferences/judge", "evaluate-sft"} & after


def test_the_judge_of_the_sampled_model_is_the_same_artifact(judged: Planned) -> None:
    graph = judged("1. Be kind.").graph
    assert graph.nodes["preferences/judge"].path == graph.nodes["preferences/model"].path


@pytest.mark.parametrize(
    ("constitution", "override", "field", "message"),
    [
        ("Be kind.", "name=tiny", "reward.judge.constitution", "no line begins with the number of a clause"),
        (
            "1. A.\n1. B.",
            "name=tiny",
            "reward.judge.constitution",
            "clause 1 is on line 1 and again on line 2",
        ),
        ("1. A.", "stages.preferences.reward.judge.from=cooldown", "judge.from", "has no chat template"),
        ("1. A.", "stages.preferences.reward.max_tokens=129", "reward.max_tokens", "above the context 128"),
        ("1. A.", "stages.preferences.reward.judge.constitution=/nowhere", "constitution", "nothing at"),
    ],
)
def test_a_judge_that_cannot_judge_is_refused_by_the_plan(
    judged: Planned, constitution: str, override: str, field: str, message: str
) -> None:
    with pytest.raises(SpecError) as caught:
        judged(constitution, override)
    assert field in str(caught.value)
    assert message in str(caught.value)


def test_a_judge_that_a_server_has_needs_no_folder(judged: Planned, tmp_path: Path) -> None:
    server = "{url: 'http://host/v1', model: theirs, api: chat}"
    stated = f"{{server: {server}, revision: '1', constitution: {tmp_path / 'constitution.md'}}}"
    plan = judged("1. Be kind.", f"stages.preferences.reward={{judge: {stated}}}")
    inputs = plan.graph.nodes["preferences/rewards"].inputs
    assert set(inputs) == {"prompts", "completions", "tokenizer", "constitution"}
