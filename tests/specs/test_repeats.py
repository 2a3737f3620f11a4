"""Repeated layers: the steps by hand, the counts, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from specs.hugging_face import hugging_face_config
from specs.layer_schedule import LayerStep, Repeats
from specs.model import ModelSpec
from specs.trainable import sizes, untouched
from tests.models import flops_per_token

SMALL: dict[str, Any] = {
    "dim": 32, "n_layers": 4, "n_heads": 2, "n_kv_heads": 1, "head_dim": 16, "ffn_dim": 64, "vocab_size": 256
}  # fmt: skip
RANGE = {"start": 1, "layers": 2, "times": 3}


def test_a_pass_reads_the_keys_that_its_layers_made_in_the_passes_before() -> None:
    assert Repeats(**RANGE).schedule(4) == [
        LayerStep(0),
        LayerStep(1),
        LayerStep(2, normed=True),
        LayerStep(1, reads=(2,)),
        LayerStep(2, reads=(3,), normed=True),
        LayerStep(1, reads=(2, 4)),
        LayerStep(2, reads=(3, 5), normed=True),
        LayerStep(3),
    ]
    control = Repeats(**RANGE, keys="own", norm=False).schedule(4)
    assert control == [LayerStep(layer) for layer in (0, 1, 2, 1, 2, 1, 2, 3)]


def test_weights_count_once_products_n_times_and_scores_n_times_n_plus_1_halves() -> None:
    plain = ModelSpec(**SMALL)
    model, control = (ModelSpec(**SMALL, repeats={**RANGE, "keys": keys}) for keys in ("all", "own"))
    assert model.parameters == plain.parameters + plain.dim == sum(sizes(model).values())
    assert model.layer_runs == control.layer_runs == 2 + 2 * 3
    assert model.score_runs == 2 + 2 * (3 * 4 // 2) and control.score_runs == 2 + 2 * 3
    assert flops_per_token(model, 64) - flops_per_token(control, 64) == 3 * 2 * 6 * 2 * plain.query_dim * 64
    assert model.reads_earlier_keys and not control.reads_earlier_keys
    assert "repeats" not in plain.identity_fields() and model.without_method == plain
    assert model.identity_fields()["repeats"] == RANGE
    assert control.identity_fields()["repeats"] == {**RANGE, "keys": "own"}


def test_a_backward_pass_stops_before_the_first_run_of_what_is_trained() -> None:
    model = ModelSpec(**SMALL, repeats=RANGE)
    assert untouched(model, ["layers.2.*"]) == 2
    assert untouched(model, ["schedule.norm.weight"]) == 2
    assert untouched(model, ["layers.3.*"]) == 7


def test_the_config_of_an_export_says_what_steps_read_and_which_are_normed() -> None:
    numbers = {"max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}
    spec = ModelSpec(**SMALL, repeats={"start": 1, "layers": 1, "times": 2})
    steps = [[0, []], [1, [], [], [], True], [1, [], [], [2], True], [2, []], [3, []]]
    assert hugging_face_config(spec, **numbers)["layer_schedule"] == steps


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"repeats": {"start": 3, "layers": 2, "times": 2}},
            "the range ends with layer 4, but the last layer is 3",
        ),
        ({"repeats": {"start": 1, "layers": 2, "times": 1}}, "greater than or equal to 2"),
        ({"repeats": RANGE, "depth_average": {}}, "set one of depth_average, repeats"),
        (
            {"repeats": RANGE, "attention": {"sparse": "window", "window": 8}},
            "sparse attention chooses none",
        ),
    ],
)
def test_passes_that_a_model_cannot_make_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ModelSpec(**SMALL, **fields)
