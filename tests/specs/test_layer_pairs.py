"""Layers in pairs: the steps by hand, and what a model of other layers refuses."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from specs.layer_schedule import LayerPairs, LayerStep
from specs.model import ModelSpec
from tests.models import flops_per_token

SMALL: dict[str, Any] = {
    "dim": 32, "n_layers": 6, "n_heads": 2, "n_kv_heads": 1, "head_dim": 16, "ffn_dim": 64, "vocab_size": 256
}  # fmt: skip


def test_the_steps_of_a_range_in_each_form() -> None:
    def steps(form: Any) -> list[LayerStep]:
        return LayerPairs(start=1, layers=4, form=form).schedule(6)

    assert steps("paired") == [
        LayerStep(0),
        LayerStep(1, beside=(2,)),
        LayerStep(3, beside=(4,)),
        LayerStep(5),
    ]
    assert steps("dropped") == [LayerStep(0), LayerStep(1), LayerStep(3), LayerStep(5)]
    assert steps("swapped") == [
        LayerStep(0),
        LayerStep(2),
        LayerStep(1),
        LayerStep(4),
        LayerStep(3),
        LayerStep(5),
    ]


def test_all_layers_of_a_range_run_at_once() -> None:
    steps = LayerPairs(start=1, layers=4, form="parallel").schedule(6)
    assert steps == [LayerStep(0), LayerStep(1, beside=(2, 3, 4)), LayerStep(5)]


def test_random_pairs_have_each_layer_once_no_neighbours_and_depend_on_the_seed() -> None:
    seen = set()
    for seed in range(30):
        steps = LayerPairs(start=2, layers=6, form="random", seed=seed).schedule(9)
        pairs = [step.layers for step in steps if step.beside]
        assert sorted(layer for step in steps for layer in step.layers) == list(range(9))
        assert len(pairs) == 3 and all(abs(first - second) > 1 for first, second in pairs)
        assert pairs == sorted(pairs)
        seen.add(tuple(pairs))
    assert len(seen) == 5  # all the pairings of six layers without neighbours


def test_the_model_has_the_same_parameters_and_the_plain_one_keeps_its_identity() -> None:
    plain = ModelSpec(**SMALL)
    paired = ModelSpec(**SMALL, layer_pairs={"start": 1, "layers": 4})
    assert "layer_pairs" not in plain.identity_fields()
    assert paired.identity_fields()["layer_pairs"] == {"start": 1, "layers": 4}
    assert paired.parameters == plain.parameters and paired.without_method == plain
    assert flops_per_token(paired, 64) == flops_per_token(plain, 64)
    dropped = ModelSpec(**SMALL, layer_pairs={"start": 1, "layers": 4, "form": "dropped"})
    assert (paired.layer_runs, dropped.layer_runs) == (6, 4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_pairs": {"start": 3, "layers": 4}}, "the range ends with layer 6, but the last layer is 5"),
        ({"layer_pairs": {"start": 0, "layers": 3}}, "multiple of 2"),
        ({"layer_pairs": {"start": 0, "layers": 2, "form": "random"}}, "set layers to 4 or more"),
        ({"layer_pairs": {"start": 0, "layers": 2, "seed": 1}}, "seed has no meaning with form: paired"),
        (
            {"layer_pairs": {"start": 0, "layers": 2}, "depth_average": {}},
            "one order of its layers; set one of depth_average, layer_pairs",
        ),
    ],
)
def test_a_range_that_a_model_does_not_have_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ModelSpec(**SMALL, **fields)
