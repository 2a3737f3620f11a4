"""Values of a file are merged over those of the file that it extends."""

from __future__ import annotations

import pytest

from specs.recipe import load
from tests.specs.composing import errors, stage, write

pytestmark = pytest.mark.usefixtures("beside_the_base")


def test_the_file_wins_over_the_one_it_extends_key_by_key() -> None:
    child = write(
        "child.yaml",
        """\
        extends: base.yaml
        name: child
        stages:
          pretrain:
            optimizer: {lr: 2e-2, betas: [0.9, 0.99, 0.99]}
          export: null
          second: {kind: mixture, weights: {corpus/notes: 1}, seed: 2}
        """,
    )
    pipeline = load(child)
    assert pipeline.name == "child"
    assert list(pipeline.stages) == ["tokenizer", "corpus", "main", "pretrain", "cooldown", "second"]
    optimizer = stage(pipeline, "pretrain").optimizer
    assert (optimizer.lr, optimizer.weight_decay, optimizer.betas) == (2e-2, 0.1, (0.9, 0.99, 0.99))
    assert stage(pipeline, "pretrain").goldfish.k == 4


def test_null_removes_a_field_that_the_extended_file_states_and_a_variable_sets_null() -> None:
    removed = load(write("removed.yaml", "extends: base.yaml\nstages: {pretrain: {goldfish: null}}\n"))
    assert stage(removed, "pretrain").goldfish.k == 50  # the default
    text = 'extends: base.yaml\nvariables: {none: null}\nstages: {pretrain: {goldfish: "${none}"}}\n'
    assert stage(load(write("none.yaml", text)), "pretrain").goldfish is None


def test_removing_a_missing_stage_is_reported_with_all_other_errors() -> None:
    child = write("child.yaml", "extends: base.yaml\nstages:\n  exprt: null\n  main: {sed: 1}\n")
    assert errors(child) == [
        "child.yaml:3: stages.exprt: there is no stage 'exprt' to remove. Fix: did you mean 'export'?",
        "child.yaml:4: stages.main.sed: there is no field 'sed' here. Fix: did you mean 'seed'?",
    ]
