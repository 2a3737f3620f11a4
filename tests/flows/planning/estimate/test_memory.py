"""Memory of a GPU, by settings and layout. tests/apertus_model/trainer/test_memory_model.py compares it with
the engine."""

from __future__ import annotations

import pytest

from flows.planning.estimate import flops
from flows.planning.estimate.memory import memory_of_step
from specs.launch import Parallel
from tests.flows.planning.segments import segment


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ({"micro_batch_size": 1}, {"micro_batch_size": 4}),
        ({"activation_checkpointing": "full"}, {"activation_checkpointing": "selective"}),
        ({"activation_checkpointing": "selective"}, {"activation_checkpointing": "none"}),
        (
            {"activation_checkpointing": "memory_budget", "memory_budget": 0.4},
            {"activation_checkpointing": "memory_budget", "memory_budget": 0.6},
        ),
        ({"parallel": Parallel(tp=4, sequence_parallel=True)}, {"parallel": Parallel(tp=4)}),
        ({"parallel": Parallel(tp=4)}, {"parallel": Parallel(tp=2)}),
        ({"parallel": Parallel(cp=2)}, {}),
        ({}, {"parallel": Parallel(reshard_after_forward="never")}),
        ({}, {"parallel": Parallel(dp_replicate=64)}),
        ({"parallel": Parallel(pp=4)}, {"parallel": Parallel(pp=4, pp_schedule="gpipe")}),
    ],
)
def test_memory_settings_reduce_estimated_memory(less: dict[str, object], more: dict[str, object]) -> None:
    found = [
        memory_of_step(segment(**{"micro_batch_size": 2, **changes}), 64).total for changes in (less, more)
    ]
    assert found[0] < found[1]


@pytest.mark.parametrize(("budget", "kind"), [(0.0, "full"), (1.0, "none")])
def test_the_ends_of_the_memory_budget_are_full_recomputation_and_none(budget: float, kind: str) -> None:
    spec = segment(activation_checkpointing="memory_budget", memory_budget=budget)
    named = segment(activation_checkpointing=kind)
    assert memory_of_step(spec, 64).activations == memory_of_step(named, 64).activations
    assert flops.recomputation(spec) == flops.recomputation(named)


def test_weights_and_states_are_sharded_over_all_but_replicas() -> None:
    memory = memory_of_step(segment(parallel=Parallel(dp_replicate=2, tp=2), micro_batch_size=1), 16)
    parameters = 8_053_338_176
    positions = 4096 * 2 * 128 * 4  # cosines and sines
    assert memory.weights == pytest.approx(4 * parameters / 8 + positions, rel=1e-3)
    assert memory.optimizer_states == pytest.approx(12 * parameters / 8, rel=1e-3)
