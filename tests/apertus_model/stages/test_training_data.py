"""A checkpoint is resumed from with the data that it was trained on."""

from __future__ import annotations

import pytest

from apertus_model.stages.training_data import OtherDataError, same_data


def test_other_data_are_refused_with_what_differs() -> None:
    then = {
        "seed": 28,
        "samples": 40,
        "sources": {"aa": {"weight": 3, "sequences": 1000}, "bb": {"weight": 1, "sequences": 50}},
    }
    same_data(then, then, 5)
    now = {
        "seed": 28,
        "samples": 40,
        "sources": {"aa": {"weight": 3, "sequences": 998}, "cc": {"weight": 1, "sequences": 50}},
    }
    with pytest.raises(OtherDataError) as caught:
        same_data(now, then, 5)
    assert "step 5" in str(caught.value)
    assert "sources.aa.sequences: 1000 -> 998" in str(caught.value)
    assert "sources.bb.weight: 1 -> none" in str(caught.value)
    assert "sources.cc.weight: none -> 1" in str(caught.value)
