"""Parts of preference data: what is made again after a change, and which model completes."""

from __future__ import annotations

from collections.abc import Callable

from flows.planning.plan import Plan
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
