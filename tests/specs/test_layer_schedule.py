"""Which states a sum has, by hand and by the published counts."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from specs.hugging_face import not_representable
from specs.layer_schedule import INPUT, DepthAverage, LayerStep
from specs.model import ModelSpec
from tests.models import flops_per_token

SMALL: dict[str, Any] = {
    "dim": 16,
    "n_layers": 6,
    "n_heads": 2,
    "n_kv_heads": 1,
    "head_dim": 8,
    "ffn_dim": 40,
    "vocab_size": 128,
}


def summed(average: DepthAverage, n_layers: int) -> list[list[int]]:
    return [list(step.summed) for step in average.schedule(n_layers)]


def test_a_sum_has_the_states_at_its_distances_down_to_the_embedding() -> None:
    assert summed(DepthAverage(), 3) == [[0, 1], [0, 1, 2], [0, 1, 2, 3]]
    assert summed(DepthAverage(dilation=2), 4) == [[1], [0, 2], [1, 3], [0, 2, 4]]
    assert summed(DepthAverage(dilation=2, period=3), 6) == [[], [], [1, 3], [], [], [0, 2, 4, 6]]
    assert summed(DepthAverage(over="layer", period=2), 4) == [[], [INPUT, 2], [], [INPUT, 4]]


@pytest.mark.parametrize(
    ("n_layers", "dilation", "period", "sums", "weights"),
    [(48, 1, 1, 48, 1224), (48, 4, 5, 9, 62), (72, 4, 5, 14, 140)],
)
def test_the_published_models_have_the_published_number_of_weights(
    n_layers: int, dilation: int, period: int, sums: int, weights: int
) -> None:
    """arXiv 2402.02622: 48 blocks have 48 * 51 / 2 weights without dilation and period."""
    steps = DepthAverage(dilation=dilation, period=period).schedule(n_layers)
    assert [step.layer for step in steps] == list(range(n_layers))
    assert sum(bool(step.summed) for step in steps) == sums
    assert sum(len(step.summed) for step in steps) == weights


def test_the_plain_stack_is_neutral() -> None:
    plain, dense = ModelSpec(**SMALL), ModelSpec(**SMALL, depth_average={})
    assert plain.schedule == tuple(LayerStep(layer) for layer in range(6))
    assert plain.plain_stack and not dense.plain_stack
    assert "depth_average" not in plain.identity_fields()
    assert dense.identity_fields()["depth_average"] == {"dilation": 1, "period": 1}
    assert dense.parameters - plain.parameters == dense.sum_weights == 6 * 9 // 2
    # 3 x forward, 2 per multiply-add of a state
    assert flops_per_token(dense, 64) - flops_per_token(plain, 64) == 3 * 2 * 27 * 16


def test_a_reward_model_with_sums_has_no_class_in_transformers() -> None:
    assert not_representable(ModelSpec(**SMALL, depth_average={})) is None
    assert "no class for rewards" in str(
        not_representable(ModelSpec(**SMALL, depth_average={}, head="reward"))
    )


@pytest.mark.parametrize(
    ("average", "message"),
    [
        ({"dilation": 7}, r"with dilation 7 and period 1, no sum over 6 layers has an earlier state"),
        ({"dilation": 4, "period": 5, "over": "layer"}, r"dilation 4 has no meaning over: layer"),
        ({"period": 7}, r"with dilation 1 and period 7, no sum over 6 layers"),
        ({"dilation": 6, "period": 4}, r"with dilation 6 and period 4, no sum"),
        ({"period": 0}, r"greater than or equal to 1"),
        ({"dilation": 10_001}, r"less than or equal to 10000"),
    ],
)
def test_sums_without_an_earlier_state_are_refused(average: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ModelSpec(**SMALL, depth_average=average)
