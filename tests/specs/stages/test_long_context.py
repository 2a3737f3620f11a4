"""A chain of steps: each starts from the end of the one before it."""

from __future__ import annotations

from specs.stages.long_context import LongContextStage


def test_the_first_step_starts_from_the_parent_and_each_other_from_the_one_before_it() -> None:
    common = {"global_batch_size": 2, "budget": "3 steps", "mixture": "m"}
    steps = [
        {"sequence_length": length, "rope_theta": base, **common}
        for length, base in ((16, 1e4), (32, 2e4), (64, 4e4))
    ]
    stage = LongContextStage.model_validate({"kind": "long_context", "from": "base@step=9", "steps": steps})
    phases = stage.phases("longer")
    assert [(phase.name, str(phase.parent), phase.rope_theta) for phase in phases] == [
        ("longer/1", "base@step=9", 1e4),
        ("longer/2", "longer/1", 2e4),
        ("longer/3", "longer/2", 4e4),
    ]
    assert [phase.training.sequence_length for phase in phases] == [16, 32, 64]
    assert {phase.carry for phase in phases} == {("weights", "data")}
    assert phases[1].path == ("stages", "longer", "steps", 1)
