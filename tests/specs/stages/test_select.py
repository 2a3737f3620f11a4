"""What a selection chooses among, and by which metric."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from specs.stages.select import SelectStage


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "set either checkpoints or evaluations"),
        ({"checkpoints": ["a"], "evaluations": ["e"]}, "set either checkpoints or evaluations"),
        (
            {"checkpoints": ["a", "b"], "metric": "perplexity"},
            "compared by val_loss or val_loss/<source>, not by 'perplexity'",
        ),
        ({"checkpoints": ["a", "b"], "metric": "val_losses"}, "not by 'val_losses'"),
    ],
)
def test_a_selection_that_cannot_be_made_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        SelectStage.model_validate({"kind": "select", **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {"checkpoints": ["a", "b"], "metric": "val_loss/chat/questions"},
        {"evaluations": ["a", "b"], "metric": "perplexity"},
    ],
)
def test_evaluations_are_compared_by_any_metric_and_checkpoints_by_held_out_loss(fields: Any) -> None:
    assert SelectStage.model_validate({"kind": "select", **fields}).metric == fields["metric"]
