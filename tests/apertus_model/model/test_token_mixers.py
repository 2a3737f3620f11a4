"""Which layers have attention, and which have what replaces it."""

from __future__ import annotations

from typing import Any

import pytest

from apertus_model.model.model import model_config
from specs.mamba import Mamba
from specs.model import ModelSpec
from specs.sparse_attention import Windowed

PLAIN = ModelSpec(dim=16, n_layers=3, n_heads=2, n_kv_heads=1, head_dim=8, ffn_dim=32, vocab_size=128)


@pytest.mark.parametrize(
    ("field", "kinds"),
    [
        ({}, ["GQAttention"] * 3),
        ({"attention": Windowed(sparse="window", window=4)}, ["ChoosingAttention"] * 3),
        ({"mamba": Mamba(layers=[1])}, ["GQAttention", "MambaMixer", "GQAttention"]),
        ({"mamba": Mamba(layers="all")}, ["MambaMixer"] * 3),
    ],
)
def test_a_layer_has_attention_unless_a_field_replaces_it(field: dict[str, Any], kinds: list[str]) -> None:
    config = model_config(PLAIN.model_copy(update=field), sequence_length=16, attention="sdpa")
    built = config.build()
    assert [type(layer.attention).__name__ for layer in built.layers.values()] == kinds
    own = [hasattr(layer.attention, "set_own_sharding") for layer in config.layers]
    assert own == [kind == "MambaMixer" for kind in kinds]
