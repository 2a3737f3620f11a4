"""Pretraining has no parent: what others inherit is stated."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from specs.stages.pretrain import PretrainStage

STAGE: dict[str, Any] = {
    **{"kind": "pretrain", "model": {"flavour": "mini"}, "mixture": "main", "optimizer": {"lr": 1e-3}},
    **{"sequence_length": 32, "global_batch_size": 4, "budget": "9 steps"},
}


def without(name: str) -> dict[str, Any]:
    return {field: value for field, value in STAGE.items() if field != name}


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (without("sequence_length"), "no parent to take sequence_length from; set it"),
        (without("global_batch_size"), "no parent to take global_batch_size from; set it"),
        ({**STAGE, "optimizer": {}}, "no parent to take the learning rate from; set optimizer.lr"),
        *(
            ({**STAGE, name: "rest of parent"}, f"no parent, and so no rest of parent for {name}")
            for name in ("global_batch_size", "mixture", "schedule", "budget")
        ),
    ],
)
def test_what_a_parent_would_give_is_stated(stage: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        PretrainStage.model_validate(stage)


def test_it_begins_with_new_weights() -> None:
    (phase,) = PretrainStage.model_validate(STAGE).phases("base")
    assert (phase.name, phase.parent, phase.seed, phase.carry) == ("base", None, 28, ())
    assert phase.model is not None and phase.model.flavour == "mini"
