"""Optimizers of the engine: what a stage states wins over what their state remembers."""

from pathlib import Path

import pytest

from apertus_model.model.model import model_config
from apertus_model.trainer.optimizer import Optimizers, optimizer_config
from specs.optimizer import OptimizerSpec
from specs.schedule import Schedule
from tests.apertus_model.harness import MODEL, difference, full, same, segment, train
from tests.apertus_model.trainer.checkpoints import at, full_weights

# The traps of torchtitan that ENGINE_NOTES names, and others of their kind.


def test_the_new_spec_wins_over_what_the_optimizer_of_the_parent_remembers(tmp_path: Path) -> None:
    train(tmp_path / "parent", segment())
    changed = segment(
        start_step=0,
        end_step=1,
        schedule=Schedule(),
        optimizer=OptimizerSpec(lr=3e-4, weight_decay=0.7).resolved({}),
    )
    child = train(tmp_path / "child", changed, source=at(tmp_path / "parent", 6), begin_step=0)[0]
    assert child.learning_rates == [3e-4, 3e-4]
    assert child.weight_decays == [0.0, 0.7]
    assert child.rows[0]["lr"] == 3e-4
    parent = full_weights(tmp_path / "parent" / "step-6")
    moved = difference(child.weights, {name: parent[name] for name in child.weights})
    # the first step is made with the new rate; at the old one of 1e-2 it would move ~0.1
    assert 0 < moved < 3e-3


@pytest.mark.parametrize("name", ["ademamix", "adamw"])
def test_reading_the_state_of_a_new_optimizer_advances_no_counter(name: str) -> None:
    model = model_config(MODEL, sequence_length=16, attention="sdpa").build()
    model.init_weights()
    optimizers = Optimizers(
        optimizer_config(OptimizerSpec(name=name, lr=1e-2).resolved({})), model_parts=[model]
    )
    before = full(model.state_dict())
    state = optimizers.state_dict()
    optimizers.load_state_dict(state)
    assert {float(value) for key, value in optimizers.state_dict().items() if key.endswith(".step")} == {0.0}
    assert all(not value.any() for value in optimizers.state_dict().values())
    assert same(full(model.state_dict()), before)
