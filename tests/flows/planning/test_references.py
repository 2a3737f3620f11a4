"""Naming checkpoints: by step, tokens, the last and the best; and what a protected stage is safe from."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.planning.plan import Plan, make
from infra.store import Store
from specs.errors import SpecError
from specs.recipe import load
from tests.flows.conftest import finish
from tests.recipes import CHAT, write_recipe

Planned = Callable[..., Plan]


@pytest.mark.parametrize(
    ("reference", "node", "step"),
    [
        ("sft", "sft", 8),
        ("sft@last", "sft", 8),
        ("sft@step=3", "sft", 3),
        ("sft@tokens=2_048", "sft", 4),  # 4 sequences of 128 tokens in a step
        ("sft@tokens=2_500", "sft", 4),
    ],
)
def test_every_kind_that_reads_a_checkpoint_takes_every_reference(
    chat: Planned, reference: str, node: str, step: int
) -> None:
    stages = ("preferences", "qrpo", "dpo", "evaluate-sft", "chat-model")
    plan = chat(
        *(f"stages.{name}.from={reference}" for name in stages),
        f"stages.merged.checkpoints=[{reference}, qrpo]",
    )
    roles = {
        "preferences/log_probabilities": "checkpoint",
        "qrpo": "parent",
        "dpo": "parent",
        "evaluate-sft": "checkpoint",
    }
    for name, role in (roles | {"chat-model": "checkpoint"}).items():
        read = plan.graph.nodes[name].inputs[role]
        assert (read.node, read.step) == (node, step), name
    assert (node, step) in {(read.node, read.step) for read in plan.graph.nodes["merged"].inputs.values()}
    assert step in plan.graph.nodes["sft"].part.checkpoint.milestones  # type: ignore[attr-defined]  # a segment


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "stages.cooldown.checkpoint.best=[val_loss]",
            (
                r"cooldown\.checkpoint\.best\[0\]: 'val_loss' is a held-out loss, but 'cooldown' measures"
                r" none. Fix: give it a validation"
            ),
        ),
        (
            "stages.pretrain.checkpoint.best=[val_loss/corpus/notes, val_loss/note]",
            (
                r"best\[1\]: 'val_loss/note' is the held-out loss of 'note', which 'pretrain' does not train"
                r" on. Fix: use one of corpus/notes"
            ),
        ),
        (
            "stages.evaluate.gates=[{metric: perplexity, max: 9}, {metric: perplexty, max: 9}]",
            (
                r"gates\[1\]\.metric: 'evaluate' will not have a metric 'perplexty'. Fix: did you mean"
                r" 'perplexity'"
            ),
        ),
        (
            "stages.evaluate-sft.gates=[{metric: forgetting, max: 9}]",
            "'evaluate-sft' will not have a metric 'forgetting'",
        ),
    ],
)
def test_unmeasured_metric_is_refused_before_anything_runs(
    chat: Planned, override: str, message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        chat(override)


EVALUATIONS = """\
  probes: {{kind: corpus, tokenizer: tokenizer, sources: {{notes: {{repeats: {{buckets: [0, 4],
    per_bucket: 2, length: 24}}}}}}}}
  recalled: {{kind: evaluate, from: cooldown, memorisation: {{probes: probes, prefixes: [16], suffix: 8}}}}
  sharp: {{kind: probe, from: cooldown, sources: [corpus/notes]}}
"""
REFUSED = [
    (
        "stages.recalled.memorisation.prefixes=[4,17]",
        (
            "stages.recalled.memorisation: offset 0, prefix 17 and suffix 8 are 25 tokens, but the probes of "
            "'probes' have 24. Fix: set a sum of 24 at most, or a larger repeats.length of the corpus."
        ),
    ),
    (
        "stages.recalled.memorisation.offsets=[0,84]",
        "stages.recalled.memorisation: offset 84, prefix 16 and suffix 8 are 108 tokens",
    ),
    (
        "stages.recalled.gates=[{metric: memorisation/greedy/prefix-16/offset-0/exact/8, max: 0}]",
        (
            "'recalled' will not have a metric 'memorisation/greedy/prefix-16/offset-0/exact/8'. Fix: did you"
            " mean 'memorisation/greedy/prefix-16/offset-0/exact/"
        ),
    ),
    (
        "stages.recalled.reference={perplexity: {value: 9, unit: metric, source: a report}}",
        "stages.recalled.reference.perplexity: 'recalled' will not have a metric 'perplexity'",
    ),
    (
        "stages.evaluate.by_position={sequence_length: 100000}",
        (
            "evaluate.by_position.sequence_length: sequences of 100,000 tokens, and the model was trained on"
            " 32 at most; the limit is 16 times that. Fix: set 512 or less."
        ),
    ),
    ("stages.evaluate.sequence_length=513", "stages.evaluate.sequence_length: sequences of 513 tokens"),
    ("stages.sharp.sequence_length=513", "stages.sharp.sequence_length: sequences of 513 tokens"),
    (
        "stages.evaluate.by_position={sequence_length: 16, buckets: 17}",
        "stages.evaluate.by_position: 17 buckets exceed 16 positions; set at most 16 buckets",
    ),
    (
        "stages.preferences.completions.n=1",
        (
            "stages.preferences.completions.n: no prompt has a pair with 1 sampled completion, even with"
            " offline ones. Fix: set 2 or more."
        ),
    ),
    (
        "stages.preferences.offline=false stages.preferences.completions.temperature=0",
        (
            "stages.preferences.completions.temperature: no prompt has a pair: at temperature 0 all of its"
            " completions are the same"
        ),
    ),
    (
        "stages.preferences.max_tokens=16",
        (
            "stages.preferences.max_tokens: max_new_tokens 16 leaves no room for a prompt in max_tokens 16. "
            "Fix: set max_new_tokens below 16, or a larger max_tokens."
        ),
    ),
    (
        "stages.preferences.completions.max_new_tokens=64",
        (
            "stages.preferences.completions.max_new_tokens: max_new_tokens 64 leaves no room for a prompt in"
            " max_tokens (half of sequence_length) 64"
        ),
    ),
    (
        "stages.evaluate-sft.generation.sampling.max_new_tokens=128",
        (
            "generation.sampling.max_new_tokens: max_new_tokens 128 leaves no room for a prompt in context"
            " length 128"
        ),
    ),
    (
        "stages.probes.sources.notes.repeats.buckets=[2, 2, -1]",
        "repeats.buckets[2]: -1 is below 0",
    ),
    (
        "stages.probes.sources.notes.repeats.buckets=[0, 2, 2]",
        "repeats.buckets: 2 is repeated; list it once",
    ),
    (
        "stages.pretrain.checkpoint.milestones=[-3]",
        "milestones[0]: -3 is below 1",
    ),
    (
        "stages.pretrain.checkpoint.milestones=[5, 0]",
        "milestones[1]: 0 is below 1",
    ),
    (
        "stages.pretrain.budget=100000001 steps",
        "stages.pretrain.budget: 100000001 steps are 100,000,001 steps; the limit is",
    ),
    (
        "stages.sft.budget=10000000 steps stages.sft.checkpoint.interval=2",
        (
            "stages.sft.checkpoint.interval: 5,000,000 checkpoints in 10,000,000 steps; the limit is"
            " 1,000,000. Fix: set 10 or more."
        ),
    ),
    (
        "stages.pretrain.sequence_length=1000000 stages.pretrain.budget=16 steps",
        (
            "(0 sequences of 1000000). "
            "Fix: lower the budget or the source's weight, add data, or shorten the sequences."
        ),
    ),
    ("launch.threads=99999", "launch.threads: 99999 is above 4096"),
    ("launch.parallel.dp_shard=0", "launch.parallel.dp_shard: 0 processes hold no weights"),
    ("launch.time_limit=0s", "launch.time_limit: a duration of 0s leaves no time"),
    ("launch.threads=99999999999999999999", "'99999999999999999999' does not fit into 64 bits"),
    ("stages.pretrain.seed=9223372036854775808", "'9223372036854775808' does not fit into 64 bits"),
    ("retries.backoff=9999999d", "retries.backoff: '9999999d' is longer than 3650 days"),
    (
        "stages.main.weights.corpus/notes=.nan",
        "stages.main.weights.corpus/notes: .nan is not a number",
    ),
    (
        "stages.pretrain.budget=[/foo]",
        "stages.pretrain.budget: ['/foo'] is not an amount; write for example '15T tokens'",
    ),
    (
        "stages.pretrain.model.rope_scaling={high_freq_factor: 1}",
        "high_freq_factor 1 is not above low_freq_factor 1; raise it",
    ),
]


@pytest.mark.parametrize(("override", "message"), REFUSED)
def test_plan_refuses_mistakes_that_would_fail_later(
    tmp_path: Path, store: Store, override: str, message: str
) -> None:
    path = write_recipe(tmp_path, CHAT + EVALUATIONS)
    with pytest.raises(SpecError) as caught:
        make(load(path, re.split(r" (?=stages)", override)), store)
    assert message in str(caught.value)
    assert [problem.where for problem in caught.value.problems if "--set " in problem.where]


def test_the_largest_values_are_planned(tmp_path: Path, store: Store) -> None:
    largest = (
        ("prefixes=[16]", "suffix=8"),
        "by_position={sequence_length: 512, buckets: 512}",
        "preferences.max_tokens=17",
    )
    overrides = [
        *(f"stages.recalled.memorisation.{field}" for field in largest[0]),
        f"stages.evaluate.{largest[1]}",
    ]
    make(load(write_recipe(tmp_path, CHAT + EVALUATIONS), [*overrides, f"stages.{largest[2]}"]), store)


@pytest.mark.parametrize("where", ["stages.{}", "sources.{}", "name"])
def test_a_name_longer_than_a_file_may_have_is_refused(tmp_path: Path, store: Store, where: str) -> None:
    text = CHAT.replace("tiny", "n" * 101, 1) if where == "name" else CHAT
    text = text.replace("  sharp", "")
    if where == "stages.{}":
        text += f"  {'n' * 101}: {{{{kind: probe, from: cooldown, sources: [corpus/notes]}}}}\n"
    if where == "sources.{}":
        text = text.replace("sources:\n", f"sources:\n  {'n' * 101}: {{{{url: x, format: text}}}}\n", 1)
    with pytest.raises(SpecError, match=r"is too long\. Fix: write at most 100 characters"):
        load(write_recipe(tmp_path, text))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "stages.evaluate-sft.from=sft@best:val_loss/chat/question",
            "which 'sft' does not train on. Fix: did you mean 'chat/questions'",
        ),
        (
            "stages.chat-model.from=merged@best:val_loss",
            r"'merged' is a merge and has one result. Fix: write 'merged'",
        ),
        (
            "stages.chat.tokenizer=tokenizer@step=3",
            r"'tokenizer@step=3' names a step, but a tokenizer such as 'tokenizer' has no steps",
        ),
        (
            "stages.evaluate.sources=[corpus/notes@last, corpus/notes@step=2]",
            r"sources\[1\]: 'corpus/notes@step=2' names a step",
        ),
        (
            "stages.sft.from=longer/1@step=9",
            r"'longer/1@step=9' is outside stage 'longer/1', which has 4 steps",
        ),
    ],
)
def test_a_reference_that_names_nothing_is_refused(chat: Planned, override: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        chat(override)


def test_a_merge_of_a_step_that_was_not_kept_names_the_entry_and_the_kept_steps(chat: Planned) -> None:
    finish(chat(), *(name for name in chat().graph.nodes if name not in ("merged",)))
    with pytest.raises(
        SpecError, match=r"stages\.merged\.checkpoints\[1\]: step 2 of 'dpo' was not kept; kept are 4"
    ):
        chat("stages.merged.checkpoints=[qrpo, dpo@step=2]")


def test_step_that_an_unfinished_parent_did_not_keep_is_refused(planned: Planned) -> None:
    finish(planned(), "tokenizer", "corpus/notes", "main", "second", "pretrain/1")
    finish(planned(), "pretrain/2", until=11)
    with pytest.raises(
        SpecError, match=r"stages\.cooldown\.from: step 10 of 'pretrain/2' was not kept; kept are 8, 11"
    ):
        planned("stages.cooldown.from=pretrain@step=10")
    planned("stages.cooldown.from=pretrain@step=12")


# protect: true


PROTECTED = "stages.pretrain.protect=true"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "stages.pretrain.optimizer.eps=1e-6",
            r"'pretrain/1' is protected and would run again: optimizer\.eps: 1e-08 -> 1e-06",
        ),
        ("stages.second.seed=7", r"'pretrain/2' is protected and would run again: second changed"),
        (
            "stages.tokenizer.bytes_per_source=9",
            r"'pretrain/1' is protected and would run again: main changed .*tokenizer changed",
        ),
        (
            "stages.pretrain.budget=30 steps",
            r"'pretrain/3' is protected.*it ended at step 16 and would now end at step 30",
        ),
        (
            "stages.pretrain.budget=14 steps",
            r"'pretrain/3' is protected.*it ended at step 16 and would now end at step 14",
        ),
    ],
)
def test_protected_stage_is_not_rerun_by_its_changes_or_its_inputs(
    planned: Planned, override: str, message: str
) -> None:
    finish(planned())
    with pytest.raises(SpecError, match=message):
        planned(PROTECTED, override)
    planned(override)


def test_an_interrupted_protected_stage_resumes(planned: Planned) -> None:
    finish(planned(), "tokenizer", "corpus/notes", "main", "second", "pretrain/1")
    finish(planned(), "pretrain/2", until=10)
    assert planned(PROTECTED).steps["pretrain/2"].action == "resume"
