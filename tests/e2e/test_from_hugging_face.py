"""A recipe that resumes from the folder that another one exported."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from flows.planning.plan import Plan, make
from infra.store import Artifact, Store
from specs.recipe import load
from tests.e2e.conftest import ROOT, Run

SECOND = """\
extends: {smoke}
name: continued
stages:
  continued:
    kind: cooldown
    matrix: {{checkpoint: {{from: cooldown}}, folder: {{from: "hf:{folder}"}}}}
    carry: [weights]
    mixture: main
    budget: 2 steps
    sequence_length: 64
    global_batch_size: 4
    optimizer: {{lr: 1e-3, betas: [0.9, 0.999, 0.9999], alpha_warmup: 0 steps, beta3_warmup: 0 steps,
      grad_clip: 1.0}}
    checkpoint: {{interval: 2}}
    precision: {{param: float32}}
    validation: {{interval: 1, samples: 2}}
  taken: {{kind: tokenizer, from: "hf:{folder}"}}
"""


# its core is tested with `import_model` in tests/apertus_model/stages/test_export.py
pytestmark = pytest.mark.slow


def artifact(plan: Plan, name: str) -> Artifact:
    node = plan.graph.nodes[name]
    return Artifact(plan.store, node.path, node.end_step)


@pytest.fixture(scope="module")
def continued(finished: Path, home: Path, api: str) -> Plan:
    """A copy of the smoke recipe's store, in which the exported model was trained on, beside the
    checkpoint that it was made from."""
    smoke = ROOT / "specs/recipes/smoke.yaml"
    exported = artifact(make(load(smoke), Store.open(str(finished))), "export")
    folder = Path(exported.store.full(exported.stored_name("config.json"))).parent
    store = shutil.copytree(finished, home / "continued")
    recipe = home / "continued.yaml"
    recipe.write_text(SECOND.format(smoke=smoke, folder=folder))
    run = Run(home, "run", str(recipe), "--store", str(store), api=api)
    assert run.wait() == 0, run.text
    return make(load(recipe), Store.open(str(store)))


def rows(plan: Plan, name: str) -> list[dict[str, Any]]:
    history = artifact(plan, name).history()
    return [
        {key: row[key] for key in ("step", "loss", "validation") if key in row}
        for row in history
        if "loss" in row or "validation" in row
    ]


def test_training_from_a_folder_equals_training_from_the_checkpoint_it_was_made_from(continued: Plan) -> None:
    """The loss before the first update, the held-out losses after each, bit by bit."""
    assert rows(continued, "continued-folder") == rows(continued, "continued-checkpoint")
    assert len(rows(continued, "continued-folder")) == 4


def test_the_tokenizer_of_the_folder_is_the_trained_one(continued: Plan) -> None:
    taken, trained = (artifact(continued, name) for name in ("taken", "tokenizer"))
    assert taken.bytes("tokenizer.json") == trained.bytes("tokenizer.json")
    assert taken.manifest.facts == trained.manifest.facts
