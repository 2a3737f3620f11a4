"""Parts of training and merging: what they start from, and what they share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flows.planning.graph import Node
from flows.planning.mixtures import corpora
from flows.planning.plan import Plan, make
from infra.store import Attempt, Store
from specs.errors import SpecError
from specs.recipe import load
from specs.stages.dpo import DpoSegment
from specs.stages.preference_data import LogProbabilitiesPart
from tests.flows.comparing import changed, segment
from tests.flows.conftest import finish, job_of
from tests.flows.planning.mixing import segments_of
from tests.infra.sealed import sealed
from tests.recipes import CHAT, write_recipe

Planned = Callable[..., Plan]


def test_a_step_of_long_context_has_length_base_and_steps_of_its_own(chat: Planned) -> None:
    first, second = segment(chat(), "longer/1"), segment(chat(), "longer/2")
    assert (first.sequence_length, first.model.rope_theta, first.start_step, first.end_step) == (
        64,
        1e6,
        0,
        4,
    )
    assert (second.sequence_length, second.model.rope_theta, second.start_step, second.end_step) == (
        128,
        2e6,
        0,
        3,
    )
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
    assert (plan.graph.nodes["sft"].inputs["parent"].node, plan.graph.nodes["sft"].inputs["parent"].step) == (
        "longer/1",
        2,
    )
    assert 2 in segment(plan, "longer/1").checkpoint.milestones
    with pytest.raises(SpecError, match=r"long_context 'longer' has no part '3'|'longer' has no part '3'"):
        chat("stages.sft.from=longer/3")


def test_the_order_of_a_merge_does_not_matter(chat: Planned) -> None:
    weighted = chat("stages.merged.weights=[3, 1]")
    turned = chat("stages.merged.checkpoints=[dpo, qrpo]", "stages.merged.weights=[1, 3]")
    assert not changed(weighted, turned)
    assert "merged" in changed(chat(), weighted)
    assert chat().graph.nodes["merged"].end_step == 1


TIES = ("stages.merged.method=ties", "stages.merged.base=sft")


def test_the_base_of_task_vectors_is_an_input_and_not_one_of_them(chat: Planned) -> None:
    merged = chat(*TIES).graph.nodes["merged"]
    assert merged.inputs["base"].node == "sft"
    assert changed(chat(*TIES), chat(*TIES, "stages.merged.base=sft@step=2")) == {"merged"}
    assert changed(chat(*TIES), chat(*TIES, "stages.merged.density=0.3")) == {"merged"}
    with pytest.raises(SpecError, match=r"merged\.base: 'qrpo' is both base and one of checkpoints"):
        chat(TIES[0], "stages.merged.base=qrpo")
    with pytest.raises(SpecError, match=r"there is no stage 'soft'"):
        chat(TIES[0], "stages.merged.base=soft")


def test_a_merge_carries_no_optimizer(chat: Planned) -> None:
    again = ["stages.again.kind=cooldown", "stages.again.from=merged"]
    with pytest.raises(SpecError, match="there is no stage 'again'"):
        chat(*again)
    with pytest.raises(
        SpecError,
        match=(
            r"carry: 'merged' is a merge, which has no optimizer states to carry. Fix: set carry:"
            r" \[weights\]"
        ),
    ):
        chat("stages.cooldown.from=merged", "stages.longer.from=pretrain")


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
    overrides = [
        "stages.preferences.from=sft@best:val_loss",
        "stages.qrpo.from=sft@best:val_loss",
        "stages.dpo.from=sft@best:val_loss",
    ]
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


def best(chat: Planned, store: Store, losses: dict[int, dict[str, float]]) -> None:
    """Finishes everything up to `sft`, whose checkpoints have these held-out losses."""
    plan = chat()
    upstream = [
        name
        for name in plan.graph.nodes
        if plan.graph.nodes[name].stage not in ("sft", "preferences", "qrpo", "dpo", "merged")
    ]
    finish(plan, *(name for name in upstream if not name.startswith(("evaluate", "chat-model"))))
    node = plan.graph.nodes["sft"]
    attempt = Attempt(job_of(plan, node), store)
    attempt.begin()
    for step, validation in losses.items():
        store.write_once(f"{attempt.folder(Attempt.checkpoint_folder(step))}/weights", b"w")
        facts = {"validation": validation, "validation_step": step if validation else None}
        attempt.commit_checkpoint(step, facts, files=sealed(attempt, step))
    attempt.commit(metrics={}, step=8)


def test_best_checkpoint_has_the_lowest_loss_overall_or_of_a_source(chat: Planned, store: Store) -> None:
    best(chat, store, {2: {"chat/questions": 3.0}, 4: {"chat/questions": 1.0}, 8: {"chat/questions": 2.0}})
    for reference in ("sft@best:val_loss", "sft@best:val_loss/chat/questions"):
        plan = chat(
            f"stages.preferences.from={reference}",
            f"stages.qrpo.from={reference}",
            f"stages.dpo.from={reference}",
        )
        assert plan.graph.nodes["qrpo"].inputs["parent"].step == 4


def test_unmeasured_best_metric_names_the_kept_steps(chat: Planned, store: Store) -> None:
    best(chat, store, {4: {}, 8: {}})
    with pytest.raises(
        SpecError,
        match=r"from: 'sft@best:val_loss': val_loss was measured at none of the steps that 'sft' kept, 4, 8",
    ):
        chat("stages.evaluate-sft.from=sft@best:val_loss")


def test_best_fit_packing_is_a_part_per_corpus_and_length_and_is_inherited(mixed: Planned) -> None:
    plan = mixed("stages.pretrain.packing=best-fit")
    packing = [name for name, node in plan.graph.nodes.items() if node.kind == "packing"]
    assert packing == [f"{stage}/packing-32/corpus/{part}" for stage, part in _parts(plan)]
    assert {plan.graph.nodes[name].part.packing for name in segments_of(plan)} == {"best-fit"}  # type: ignore[attr-defined]
    second = plan.graph.nodes["pretrain/2"]
    order = [second.inputs[f"packed:{index}"].name.removeprefix("pretrain/packing-32/") for index in range(3)]
    assert order == [read.name for read in corpora(plan.graph, "second")]
    finish(
        plan,
        metrics={
            "rows": 1255,
            "share/padding": 0.004,
            "share/cropped": 0.25,
            "share/cropped_by_windows": 0.75,
        },
    )
    again = mixed("stages.pretrain.packing=best-fit")
    assert {step.action for step in again.steps.values()} == {"reuse"}
    assert {usage.sequences for usage in again.source_usage} == {1255}
    told = (
        "1,255 rows with 0.40% padding; 25.0% of the tokens are in documents that are cut, 75.0% would be if"
        " they were concatenated"
    )
    assert f"pretrain/packing-32/corpus/sums: {told}" in again.graph.notes


def test_z_loss_is_inherited_until_it_is_stated(mixed: Planned) -> None:
    assert changed(mixed(), mixed("stages.pretrain.z_loss=0")) == set()
    plan = mixed("stages.pretrain.z_loss=1e-4")
    assert {segment(plan, name).z_loss for name in segments_of(plan)} == {1e-4}
    assert segment(plan, "cooldown").z_loss == 1e-4
    assert segment(mixed("stages.pretrain.z_loss=1e-4", "stages.cooldown.z_loss=0"), "cooldown").z_loss == 0
    with pytest.raises(SpecError, match=r"pretrain\.z_loss: .*less than or equal to 1"):
        mixed("stages.pretrain.z_loss=2")


def _parts(plan: Plan) -> list[tuple[str, str]]:
    by_main = [read.name.removeprefix("corpus/") for read in corpora(plan.graph, "main")]
    return [*(("pretrain", part) for part in [*by_main, "sums"]), *(("cooldown", part) for part in by_main)]


JUDGE = (
    CHAT
    + """\
  judge: {{kind: reward_model, from: sft, pairs: [{pairs}], global_batch_size: 4, budget: 4 steps,
    optimizer: {{lr: 1e-4}}}}
  letters: {{kind: tokenizer, sources: [notes], vocab_size: 512, bytes_per_source: 20_000}}
  foreign: {{kind: conversations, tokenizer: letters, sources: {{questions: {{holdout: 0.2}}}}}}
"""
)


def test_a_reward_model_has_its_pairs_in_a_part_and_scores_as_an_exported_folder(
    tmp_path: Path, store: Store
) -> None:
    recipe = write_recipe(tmp_path, JUDGE.replace("{pairs}", "chat"))
    graph = make(load(recipe, ["stages.preferences.reward={from: judge}"]), store).graph
    assert graph.nodes["judge"].inputs["pairs"].name == "judge/pairs"
    assert graph.nodes["judge/pairs"].inputs["conversations:0"].name == "chat/questions"
    scores = graph.nodes["preferences/rewards"].inputs["reward_model"]
    exported = graph.nodes[scores.name]
    assert (scores.name, exported.kind) == ("preferences/reward_model", "export")
    assert exported.inputs["checkpoint"].name == "judge"


def test_a_reward_model_for_another_tokenizer_is_refused(tmp_path: Path, store: Store) -> None:
    recipe = write_recipe(tmp_path, JUDGE.replace("{pairs}", "foreign"))
    with pytest.raises(SpecError, match=r"stages\.judge\.pairs: 'judge/pairs' is tokenised by 'letters'"):
        make(load(recipe), store)


FILE = (
    CHAT
    + """\
  plain: {{kind: dpo, from: sft, pairs: [{pairs}], global_batch_size: {{0 steps: 4, 2 steps: 2}},
    budget: 4 steps, optimizer: {{lr: 1e-4}}}}
  letters: {{kind: tokenizer, sources: [notes], vocab_size: 512, bytes_per_source: 20_000}}
  foreign: {{kind: conversations, tokenizer: letters, sources: {{questions: {{holdout: 0.2}}}}}}
"""
)


def test_dpo_on_pairs_of_a_file_needs_no_sampling_and_no_reward(tmp_path: Path, store: Store) -> None:
    graph = make(load(write_recipe(tmp_path, FILE.replace("{pairs}", "chat"))), store).graph
    assert [node.name for node in graph.of("plain")] == [
        "plain/pairs", "plain/log_probabilities", "plain/1", "plain/2"
    ]  # fmt: skip
    read = {name: input.name for name, input in graph.nodes["plain/pairs"].inputs.items()}
    assert read == {"conversations:0": "chat/questions", "tokenizer": "tokenizer"}
    reference = graph.nodes["plain/log_probabilities"]
    assert reference.inputs["checkpoint"].hashed == graph.nodes["plain/1"].inputs["parent"].hashed
    first, second = (graph.nodes[f"plain/{number}"] for number in (1, 2))
    for segment_node in (first, second):
        inputs = segment_node.inputs
        assert (inputs["pairs"].name, inputs["log_probabilities"].name) == (
            "plain/pairs",
            "plain/log_probabilities",
        )
    assert isinstance(first.part, DpoSegment) and isinstance(reference.part, LogProbabilitiesPart)
    assert reference.part.precision == first.part.precision
    assert reference.part.sequence_length == first.part.sequence_length


def test_the_pairs_of_dpo_have_the_tokens_of_its_model(tmp_path: Path, store: Store) -> None:
    recipe = write_recipe(tmp_path, FILE.replace("{pairs}", "foreign"))
    with pytest.raises(SpecError, match=r"stages\.plain\.pairs: 'plain/pairs' is tokenised by 'letters'"):
        make(load(recipe), store)
