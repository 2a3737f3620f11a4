"""Parts of preference data: what is made again after a change, and which model completes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.planning.estimate.inference import gpus_of_worker
from flows.planning.plan import Plan, make
from infra.store import Store
from specs.errors import SpecError, dotted
from specs.recipe import load
from specs.stages.export import ExportPart
from specs.stages.qrpo import QrpoSegment
from tests.flows.comparing import changed
from tests.flows.conftest import finish
from tests.recipes import CHAT, write_recipe

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


LENGTHS = {
    "stages.sft.sequence_length": (64, 90),
    "stages.preferences.sequence_length": (96, 200),
    "stages.preferences.max_tokens": (40, 76),
    "stages.qrpo.sequence_length": (64, 200),
    "stages.dpo.sequence_length": (48, 200),
    "stages.evaluate-sft.generation.sampling.max_new_tokens": (80, 16),
    "stages.evaluate-qrpo.generation.sampling.max_new_tokens": (150, 16),
}
"""Fields of the chat recipe with lengths: a value that does not fit and one that does, where the shortest of
the stored conversations has 90 tokens, 60 of them before the answer."""


@pytest.mark.parametrize("fields", [list(LENGTHS), *([field] for field in LENGTHS)], ids=str)
def test_lengths_that_do_not_fit_are_reported_together_at_their_fields(
    chat: Planned, fields: list[str]
) -> None:
    split = {
        "conversations": 30,
        "tokens": 3000,
        "trained_tokens": 900,
        "shortest": 90,
        "shortest_prompt": 60,
    }
    finish(chat(), "tokenizer", "chat/questions", metrics={"train": split, "validation": split})
    alone = "stages.evaluate-qrpo.against=null"
    chat(alone, *(f"{field}={fits}" for field, (_, fits) in LENGTHS.items()))
    values = {field: wrong if field in fields else fits for field, (wrong, fits) in LENGTHS.items()}
    with pytest.raises(SpecError) as caught:
        chat(alone, *(f"{field}={value}" for field, value in values.items()))
    found = {dotted(problem.path) for problem in caught.value.problems}
    expected = set(fields)
    if "stages.preferences.sequence_length" in fields:  # what reads it does not fit any more
        expected.remove("stages.preferences.sequence_length")
        expected |= {
            "stages.preferences.max_tokens",
            "stages.qrpo.sequence_length",
            "stages.dpo.sequence_length",
        }
    assert expected <= found


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


def test_a_judge_by_vllm_is_another_reward_on_as_many_gpus_as_share_its_layers(judged: Planned) -> None:
    heads = "stages.pretrain.model.n_kv_heads=2"
    before = judged("1. Be kind.", heads)
    after = judged(
        "1. Be kind.",
        heads,
        "stages.preferences.reward.judge.engine=vllm",
        "stages.preferences.launch={processes: 2, parallel: {tp: 2}}",
    )
    assert "preferences/rewards" in changed(before, after)
    assert not {"preferences/completions", "preferences/judge"} & changed(before, after)
    nodes = [plan.graph.nodes["preferences/rewards"] for plan in (before, after)]
    assert [gpus_of_worker(node.part, node.launch) for node in nodes] == [1, 2]


def test_a_judge_that_a_server_has_needs_no_folder(judged: Planned, tmp_path: Path) -> None:
    server = "{url: 'http://host/v1', model: theirs, api: chat}"
    stated = f"{{server: {server}, revision: '1', constitution: {tmp_path / 'constitution.md'}}}"
    plan = judged("1. Be kind.", f"stages.preferences.reward={{judge: {stated}}}")
    inputs = plan.graph.nodes["preferences/rewards"].inputs
    assert set(inputs) == {"prompts", "completions", "tokenizer", "constitution"}


SECOND = """\
  further: {{kind: preference_data, from: sft, prompts: [PROMPTS], completions: {{n: 4, max_new_tokens: 16}},
    reward: grounded-answer, pairs: 2}}
"""
OTHERS = """\
  others: {{kind: conversations, tokenizer: tokenizer, seed: 1, sources: {{questions: {{holdout: 0.1}}}}}}
"""


def both(folder: Path, store: Store, *overrides: str, prompts: str = "others") -> Plan:
    """The plan of a recipe with two sets."""
    recipe = write_recipe(folder, CHAT + OTHERS + SECOND.replace("PROMPTS", prompts))
    sets = "stages.qrpo.preferences={preferences: 2, further: 0.5}"
    return make(load(recipe, [sets, *overrides]), store)


def test_several_sets_are_parts_of_their_own_that_training_reads(tmp_path: Path, store: Store) -> None:
    graph = both(tmp_path, store).graph
    nodes = graph.nodes
    assert {role: read.name for role, read in nodes["qrpo"].inputs.items()} == {
        "pairs:0": "preferences/pairs",
        "log_probabilities:0": "preferences/log_probabilities",
        "pairs:1": "further/pairs",
        "log_probabilities:1": "further/log_probabilities",
        "distinct_prompts": "qrpo/distinct_prompts",
        "tokenizer": "tokenizer",
        "parent": "sft",
    }
    segment = nodes["qrpo"].part
    assert isinstance(segment, QrpoSegment) and segment.repeats == [2, 0.5]
    assert segment.source_names == ["preferences", "further"]
    assert nodes["qrpo/distinct_prompts"].inputs.keys() == {"pairs:0", "pairs:1"}
    assert {"pairs", "log_probabilities"} <= nodes["dpo"].inputs.keys()
    one = both(tmp_path, store, "stages.qrpo.preferences={further: 1}").graph.nodes["qrpo"]
    named = both(tmp_path, store, "stages.qrpo.preferences=further").graph.nodes["qrpo"]
    assert one.fingerprint == named.fingerprint != nodes["qrpo"].fingerprint
    assert {"pairs", "log_probabilities"} <= one.inputs.keys()


def test_a_changed_set_leaves_the_other_as_it_is(tmp_path: Path, store: Store) -> None:
    after = changed(both(tmp_path, store), both(tmp_path, store, "stages.further.worst_quantile=0.3"))
    assert {name for name in after if name.startswith(("preferences", "further"))} == {
        "further/pairs",
        "further/log_probabilities",
    }
    assert {"qrpo", "qrpo/distinct_prompts"} <= after and "dpo" not in after


def test_sets_with_prompts_of_the_same_conversations_are_refused_with_the_fix(
    tmp_path: Path, store: Store
) -> None:
    with pytest.raises(SpecError) as caught:
        both(tmp_path, store, prompts="chat")
    told = str(caught.value)
    assert (
        "stages.qrpo.preferences: 'preferences' and 'further' both take prompts from 'chat/questions'" in told
    )
    assert "set repeated_prompts: first" in told
    both(tmp_path, store, "stages.qrpo.repeated_prompts=first", prompts="chat")


@pytest.mark.parametrize(
    ("stated", "told"),
    [
        (
            "{preferences: 1, further: 0}",
            "0 passes train on nothing; set more than 0, or leave the source out",
        ),
        ("[preferences, thrid]", "there is no stage 'thrid'"),
        (
            "[preferences, sft]",
            "stage 'sft' is an sft; one of preference_data, rewarded_completions is needed",
        ),
        ("{}", "{} is too short. Fix: give at least 1, not 0."),
    ],
)
def test_sets_that_cannot_be_read_are_refused(tmp_path: Path, store: Store, stated: str, told: str) -> None:
    with pytest.raises(SpecError, match=re.escape(told)):
        both(tmp_path, store, f"stages.qrpo.preferences={stated}")


def test_every_set_is_made_with_the_model_that_training_starts_from(tmp_path: Path, store: Store) -> None:
    with pytest.raises(
        SpecError, match="'further' was made with step 4 of 'dpo', but this stage starts from 'sft'"
    ):
        both(tmp_path, store, "stages.further.from=dpo")


REWARDED = """\
  rewarded: {{kind: rewarded_completions, from: sft, completions: [others], MORE}}
"""


def rewarded(folder: Path, store: Store, *overrides: str, more: str = "reward: score") -> Plan:
    recipe = write_recipe(folder, CHAT + OTHERS + REWARDED.replace("MORE", more))
    return make(load(recipe, overrides), store)


def test_completions_with_rewards_are_trained_on_alone_or_beside_pairs(tmp_path: Path, store: Store) -> None:
    nodes = rewarded(tmp_path, store, "stages.qrpo.preferences=rewarded").graph.nodes
    read = {role: nodes["qrpo"].inputs[role].name for role in ("pairs", "log_probabilities")}
    assert read == {"pairs": "rewarded/completions", "log_probabilities": "rewarded/log_probabilities"}
    assert nodes["rewarded/completions"].inputs["conversations:0"].name == "others/questions"
    assert nodes["rewarded/log_probabilities"].inputs["checkpoint"].name == "sft"
    both = rewarded(tmp_path, store, "stages.qrpo.preferences=[rewarded, preferences]").graph.nodes["qrpo"]
    assert both.inputs["pairs:0"].name == "rewarded/completions"
    assert both.inputs["pairs:1"].name == "preferences/pairs"


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            ["stages.dpo.preferences=rewarded"],
            "stage 'rewarded' is a rewarded_completions; preference_data is needed here",
        ),
        (
            ["stages.qrpo.preferences=rewarded", "stages.rewarded.from=dpo"],
            "'rewarded' was made with step 4 of 'dpo', but this stage starts from 'sft'",
        ),
        (
            ["stages.rewarded.max_tokens=200"],
            "a completion of 200 tokens does not fit into a sequence of 128",
        ),
        (
            ["stages.qrpo.preferences=[preferences, rewarded]", "stages.rewarded.completions=[chat]"],
            "'preferences' and 'rewarded' both take prompts from 'chat/questions'",
        ),
    ],
)
def test_completions_with_rewards_that_cannot_be_trained_on_are_refused(
    tmp_path: Path, store: Store, overrides: list[str], told: str
) -> None:
    with pytest.raises(SpecError, match=re.escape(told)):
        rewarded(tmp_path, store, *overrides)
