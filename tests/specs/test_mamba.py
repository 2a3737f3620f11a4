"""Which layers mix tokens by Mamba-2, and what that takes."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from specs.mamba import Mamba, NewMixers
from specs.model import ModelSpec
from specs.trainable import sizes
from tests.models import flops_per_token

SMALL: dict[str, Any] = {
    "dim": 32, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "ffn_dim": 96, "vocab_size": 256
}  # fmt: skip


def test_the_order_of_layers_and_the_chunk_are_no_part_of_the_identity() -> None:
    one, other = (
        ModelSpec(**SMALL, mamba=fields)
        for fields in ({"layers": [0, 2], "chunk": 8}, {"layers": [2, 0], "chunk": 64})
    )
    assert one.identity_fields() == other.identity_fields() and one.mamba_layers == [0, 2]
    assert "mamba" not in ModelSpec(**SMALL).identity_fields()
    assert ModelSpec(**SMALL, mamba={"layers": "all"}).mamba_layers == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"mamba": {"layers": []}}, "names no layer"),
        ({"mamba": {"layers": [4]}}, "there is no layer 4, the last is 3"),
        ({"mamba": {"layers": [0]}, "attention": {"sparse": "window", "window": 4}}, "mamba and attention"),
        ({"mamba": {"layers": [0]}, "depth_average": {"period": 1}}, "mamba and depth_average"),
    ],
)
def test_what_no_model_has_is_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        ModelSpec(**SMALL, **fields)


def test_parameters_and_operations_are_those_of_the_formulas() -> None:
    """Gate and steps of 32 x (64 + 4), taps of 64 + 2 x 32 channels, a norm of 64, three numbers a head."""
    plain, hybrid = ModelSpec(**SMALL), ModelSpec(**SMALL, mamba={"layers": [1, 3], "chunk": 16})
    own = 32 * (64 + 4) + 4 * (64 + 2 * 32) + 64 + 3 * 4
    assert hybrid.parameters == plain.parameters + 2 * own == sum(sizes(hybrid).values())
    # of 4 heads and a token: two products over the chunk of 16, two with the state of 16 x 16, and for each
    # of 8 chunks the states of 8, shared by the 16 tokens of a chunk
    mixing = 4 * (2 * 16 * 16 + 2 * 16 * 16 + 16 * 16 * 8 // 16)
    scores = 2 * 4 * 16 * 128
    difference = 2 * (mixing + 32 * (64 + 4) - scores)
    assert flops_per_token(hybrid, 128) - flops_per_token(plain, 128) == 6 * difference


def test_new_parameters_are_what_attention_lacks_or_all_of_a_mixer() -> None:
    mixers = NewMixers(layers=[2])
    assert len(mixers.new_parameters(4)) == 9 and "layers.2.attention.a_log" in mixers.new_parameters(4)
    assert NewMixers(layers="all", initial="random").new_parameters(2) == (
        "layers.0.attention.*", "layers.1.attention.*"
    )  # fmt: skip
    assert set(Mamba.model_fields) < set(NewMixers.model_fields)
