"""Fields that do not fit together are problems, each with file, line, field, value and fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from specs.recipe import load
from tests.recipes import RECIPE, edit, problems, write_recipe


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("from: cooldown\n", "from: coldown\n", "there is no stage 'coldown'. Fix: did you mean 'cooldown'?"),
        (
            "from: pretrain",
            "from: main",
            (
                "stage 'main' is a mixture; one of cooldown, distill, dpo, long_context, merge, pretrain,"
                " qrpo, rewrite, select, sft is needed here. Fix: use one of pretrain."
            ),
        ),
        (
            "tokenizer: tokenizer",
            "tokenizer: corpus/notes",
            "stage 'corpus' is a corpus; tokenizer is needed here",
        ),
        ("from: pretrain\n", "from: pretrain\n    after: [export]\n", "the stages form a cycle"),
        ("kind: cooldown", "kind: coolodwn", "there is no kind 'coolodwn'. Fix: did you mean 'cooldown'?"),
        (
            "sources: [notes]",
            "sources: [note]",
            "there is no source 'note' under sources:. Fix: did you mean 'notes'?",
        ),
        ("vocab_size: 512, bytes", "vocab_size: 500, bytes", "multiple of 128"),
        ("format: text", "format: pdf", "'pdf'"),
        ("name: tiny", "name: tiny\nname: again", "is already on line 1"),
        (
            "{{metric: perplexity, max: 1000}}".replace("{{", "{").replace("}}", "}"),
            "{metric: perplexity}",
            "a gate needs max or min",
        ),
        (
            "perplexity, max: 1000}}".replace("}}", "}"),
            "perplexity, max: 5, min: 7}",
            "no value is at least 7 and at most 5",
        ),
        (
            "checkpoint: {interval: 4}",
            "checkpoint: {interval: 4, best: [val_los]}",
            "'val_los' is not of the form ^val_loss",
        ),
        (
            "budget: 6 steps",
            "budget: 6 steps\n    schedule: {warmup: 9 steps}",
            "schedule.warmup: a warm-up of 2,304 tokens does not fit into the budget of 1,536",
        ),
    ],
)
def test_each_mistake_is_reported_with_its_fix(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = problems(edit(write_recipe(tmp_path), (old, new)))
    assert message in text
    assert "tiny.yaml:" in text


def test_a_batch_that_the_processes_cannot_divide_is_refused(tmp_path: Path) -> None:
    text = problems(write_recipe(tmp_path), "launch.processes=3")
    assert "cannot be divided among 3 data-parallel processes. Fix: use a multiple of 3" in text


@pytest.mark.parametrize("batch", [0, -3])
def test_an_impossible_batch_is_one_problem(tmp_path: Path, batch: int) -> None:
    changes = [f"stages.pretrain.global_batch_size={batch}", "launch.processes=2"]
    text = problems(write_recipe(tmp_path), *changes)
    assert text.endswith(f"a batch of {batch} sequences is not possible. Fix: use 1 or more.")
    assert len(text.splitlines()) == 1


def test_a_layout_that_does_not_fit_several_stages_is_one_problem(tmp_path: Path) -> None:
    layout = ["launch.processes=2", "launch.parallel.tp=2", "stages.export.launch.parallel.tp=2"]
    assert problems(write_recipe(tmp_path), *layout) == (
        "--set launch.parallel.tp=2: launch.parallel.tp: 'pretrain', 'cooldown', 'evaluate': n_kv_heads 1"
        " cannot be divided among 2 tensor-parallel processes. Fix: use a divisor of 1."
    )


def test_no_layout_is_wrong_because_the_launch_settings_are(tmp_path: Path) -> None:
    text = problems(write_recipe(tmp_path), "launch.processes=two", "stages.pretrain.launch.parallel.tp=2")
    assert text.startswith("--set launch.processes=two: launch.processes: 'two' is not a whole number")
    assert len(text.splitlines()) == 1


def test_a_reference_of_a_wrong_kind_is_no_cycle(tmp_path: Path) -> None:
    text = problems(write_recipe(tmp_path), "stages.corpus.tokenizer=pretrain")
    assert text == (
        "--set stages.corpus.tokenizer=pretrain: stages.corpus.tokenizer: stage 'pretrain' is a pretrain;"
        " tokenizer is needed here. Fix: use one of tokenizer."
    )


def test_a_selection_among_wrong_evaluations_is_not_resolved(tmp_path: Path) -> None:
    chosen = "  chosen: {{kind: select, evaluations: [evaluate], metric: perplexity}}\n"
    text = problems(write_recipe(tmp_path, RECIPE + chosen), "stages.evaluate.samples=0")
    assert text == (
        "--set stages.evaluate.samples=0: stages.evaluate.samples: 0 is below 1. Fix: write 1 or more."
    )


def test_a_warm_up_may_be_as_long_as_the_budget_and_no_longer(tmp_path: Path) -> None:
    path = write_recipe(tmp_path)
    load(path, ["stages.cooldown.schedule.warmup=6 steps"])
    text = problems(path, "stages.cooldown.schedule={warmup: 7 steps, decay: none}")
    assert text.endswith(
        "stages.cooldown.schedule.warmup: a warm-up of 1,792 tokens does not fit into the budget of 1,536"
        " tokens. Fix: shorten it, or raise the budget."
    )


def test_relation_broken_by_an_override_names_both_places(tmp_path: Path) -> None:
    text = problems(
        write_recipe(tmp_path), "stages.pretrain.model.n_kv_heads=3", "stages.cooldown.optimizer.lr=1e-4"
    )
    line = next(
        n
        for n, line in enumerate((tmp_path / "tiny.yaml").read_text().splitlines(), 1)
        if line.strip().startswith("model:")
    )
    assert text.startswith(
        f"{tmp_path / 'tiny.yaml'}:{line}, --set stages.pretrain.model.n_kv_heads=3: stages.pretrain.model:"
        " n_heads 2 "
    )
