"""Bad recipes: every problem at once, each with file, line, field, value and fix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specs.errors import SpecError
from specs.recipe import load
from specs.schema import json_schema
from tests.recipes import write_recipe

ROOT = Path(__file__).resolve().parents[2]


def problems(path: Path, *overrides: str) -> str:
    with pytest.raises(SpecError) as caught:
        load(path, overrides)
    return str(caught.value)


def edit(path: Path, *replacements: tuple[str, str]) -> Path:
    text = path.read_text()
    for old, new in replacements:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return path


def line_of(path: Path, text: str) -> int:
    return next(number for number, line in enumerate(path.read_text().splitlines(), 1) if text in line)


def test_all_problems_of_a_file_are_reported_at_once(tmp_path: Path) -> None:
    path = edit(
        write_recipe(tmp_path),
        ("sequence_length", "sequence_lenght"),
        ("budget: 6 steps", "budget: 6 bananas"),
        ("lr: 1e-2", "lr: fast"),
        ("sources: [corpus/notes]", "sources: [corpus/nothing]"),
        ("after: [evaluate]", "after: [evaluation]"),
    )
    text = problems(path)
    expected = [
        (f"tiny.yaml:{line_of(path, 'lenght')}: stages.pretrain.sequence_lenght: there is no field", "did you mean 'sequence_length'?"),
        (f"tiny.yaml:{line_of(path, 'bananas')}: stages.cooldown.budget: 'bananas' is not a unit", "use tokens, samples or steps"),
        (f"tiny.yaml:{line_of(path, 'fast')}: stages.pretrain.optimizer.lr: 'fast'", "valid number"),
        ("stages.evaluate.sources[0]: corpus 'corpus' has no part 'nothing'", "use one of notes"),
        ("stages.export.after[0]: there is no stage 'evaluation'", "did you mean 'evaluate'?"),
    ]
    for where, fix in expected:
        line = next((line for line in text.splitlines() if where in line), None)
        assert line is not None, f"{where} is not in\n{text}"
        assert fix in line


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("from: cooldown", "from: coldown", "there is no stage 'coldown'. Fix: did you mean 'cooldown'?"),
        (
            "from: pretrain",
            "from: main",
            "stage 'main' is a mixture; one of cooldown, dpo, long_context, merge, pretrain, qrpo, select, sft is needed here",
        ),
        ("tokenizer: tokenizer", "tokenizer: corpus/notes", "stage 'corpus' is a corpus; tokenizer is needed here"),
        ("from: pretrain\n", "from: pretrain\n    after: [export]\n", "the stages form a cycle"),
        ("kind: cooldown", "kind: coolodwn", "'coolodwn' is not a kind. Fix: did you mean 'cooldown'?"),
        ("sources: [notes]", "sources: [note]", "there is no source 'note' under sources:. Fix: did you mean 'notes'?"),
        ("vocab_size: 512, bytes", "vocab_size: 500, bytes", "multiple of 128"),
        ("format: text", "format: pdf", "'pdf'"),
        ("name: tiny", "name: tiny\nname: again", "is already on line 1"),
        ("{{metric: perplexity, max: 1000}}".replace("{{", "{").replace("}}", "}"), "{metric: perplexity}", "a gate needs max or min"),
        ("perplexity, max: 1000}}".replace("}}", "}"), "perplexity, max: 5, min: 7}", "no value is at least 7 and at most 5"),
        ("checkpoint: {interval: 4}", "checkpoint: {interval: 4, best: [val_los]}", "'val_los': string should match pattern"),
        (
            "budget: 6 steps",
            "budget: 6 steps\n    schedule: {warmup: 9 steps}",
            "warm-up of 2,304 and decay of 0 tokens do not fit into 1,536",
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


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("stages.cooldown.optimizer.lrr=1", "the override matches nothing: there is no field 'lrr' here. Fix: did you mean 'lr'?"),
        ("stages.cooldwn.budget=1 steps", "the override matches nothing: there is no stage 'cooldwn'. Fix: did you mean 'cooldown'?"),
        ("lunch.processes=2", "the override matches nothing: there is no field 'lunch' here. Fix: did you mean 'launch'?"),
    ],
)
def test_an_override_that_matches_nothing_is_an_error(tmp_path: Path, assignment: str, message: str) -> None:
    text = problems(write_recipe(tmp_path), assignment)
    assert message in text
    assert f"--set {assignment}" in text


def test_overrides_are_applied(tmp_path: Path) -> None:
    pipeline = load(write_recipe(tmp_path), ["stages.cooldown.optimizer.lr=2e-4", "launch.processes=2"])
    assert pipeline.stages["cooldown"].optimizer.lr == 2e-4  # type: ignore[attr-defined]  # a cooldown has one
    assert pipeline.launch.processes == 2


def test_missing_file_suggests_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "mini.yaml").touch()
    assert problems(tmp_path / "mni.yaml") == f"{tmp_path / 'mni.yaml'}: there is no such file. Fix: did you mean 'mini.yaml'?"
    nowhere = tmp_path / "none" / "mini.yaml"
    assert problems(nowhere) == f"{nowhere}: there is no such file. Fix: there is no folder '{nowhere.parent}'."


def test_relation_broken_by_an_override_names_both_places(tmp_path: Path) -> None:
    text = problems(write_recipe(tmp_path), "stages.pretrain.model.n_kv_heads=3", "stages.cooldown.optimizer.lr=1e-4")
    line = next(n for n, line in enumerate((tmp_path / "tiny.yaml").read_text().splitlines(), 1) if line.strip().startswith("model:"))
    assert text.startswith(f"{tmp_path / 'tiny.yaml'}:{line}, --set stages.pretrain.model.n_kv_heads=3: stages.pretrain.model: n_heads 2 ")


@pytest.mark.parametrize("recipe", sorted((ROOT / "specs" / "recipes").glob("*.yaml")), ids=lambda path: path.name)
def test_every_recipe_loads_and_points_to_the_schema(recipe: Path) -> None:
    load(recipe)
    assert recipe.read_text().splitlines()[0] == "# yaml-language-server: $schema=../pipeline.schema.json"


def test_the_checked_in_schema_is_the_models() -> None:
    stored = json.loads((ROOT / "specs" / "pipeline.schema.json").read_text())
    assert stored == json.loads(json.dumps(json_schema())), "run: apertus schema -o specs/pipeline.schema.json"
