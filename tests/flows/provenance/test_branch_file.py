"""The file of a branch is short, and never written over another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flows.planning.plan import Plan
from flows.provenance.branch import Branch
from infra.store import StoreError
from tests.flows.conftest import finish

Planned = Callable[..., Plan]
ROOT = Path(__file__).resolve().parents[3]


def test_the_file_is_short_and_says_what_it_is(
    branched: Callable[..., Branch], planned: Planned, recipe: Path
) -> None:
    finish(planned())
    made = branched("pretrain@step=12", "stages.other.optimizer.lr=2e-3", "stages.cooldown.budget=3 steps")
    assert made.path == recipe.parent / "other.yaml"
    assert made.text == made.path.read_text()
    schema, *lines = made.text.splitlines()
    assert schema == f"# yaml-language-server: $schema={(ROOT / 'specs' / 'pipeline.schema.json').as_uri()}"
    assert lines[0] == "# A branch of tiny.yaml at step 12 of pretrain (1,536 tokens):"
    assert lines[2].startswith("#   apertus branch ") and "--set stages.other.optimizer.lr=2e-3" in lines[2]
    assert lines[3:] == [
        "extends: tiny.yaml",
        "name: other",
        "",
        "stages:",
        "  other: # continues pretrain from step 12",
        "    kind: cooldown",
        "    from: pretrain@step=12",
        "    mixture: rest of parent",
        "    global_batch_size: rest of parent",
        "    schedule: rest of parent",
        "    budget: rest of parent",
        "    checkpoint: {interval: 5, keep: 2}",
        "    validation: {interval: 8, samples: 2}",
        "    optimizer: {lr: 0.002}",
        "  cooldown:",
        "    from: other # was pretrain",
        "    budget: 3 steps",
    ]


def test_a_file_is_never_written_over_another_and_twice_is_once(
    branched: Callable[..., Branch], recipe: Path
) -> None:
    assert branched("pretrain@step=12").written
    assert not branched("pretrain@step=12").written
    text = (recipe.parent / "other.yaml").read_text()
    with pytest.raises(StoreError, match=r"other\.yaml' exists and is another file"):
        branched("pretrain@step=11")
    assert (recipe.parent / "other.yaml").read_text() == text
    with pytest.raises(StoreError, match="is the recipe to branch"):
        branched("pretrain@step=12", name="tiny")
