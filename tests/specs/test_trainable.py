"""Names and sizes of parameters, and the patterns of those that a stage trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from apertus_model.model.model import model_config
from specs.model import ModelSpec
from specs.trainable import MATRICES, problems, sizes, trained, untouched
from tests.recipes import CHAT, RECIPE
from tests.specs.test_layout import problems as problems_of

SMALL: dict[str, Any] = {
    "dim": 32, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "ffn_dim": 96, "vocab_size": 256
}  # fmt: skip

REPEATS: dict[str, Any] = {"repeats": {"start": 1, "layers": 2, "times": 3}}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"activation": "swiglu", "qk_norm": False},
        {"head": "reward"},
        {"depth_average": {"period": 2}},
        REPEATS,
        {"mamba": {"layers": [1, 3], "conv_width": 3}},
        {"mamba": {"layers": [1, 3], "decay": False}},
    ],
)
def test_the_names_and_sizes_are_those_of_the_engine(changes: dict[str, Any]) -> None:
    spec = ModelSpec(**SMALL, **changes)
    with torch.device("meta"):
        parameters = dict(model_config(spec, sequence_length=8, attention="sdpa").build().named_parameters())
    assert sizes(spec) == {name: parameter.numel() for name, parameter in parameters.items()}
    assert sum(sizes(spec).values()) == spec.parameters
    matrices = {
        name
        for name, one in parameters.items()
        if one.ndim == 2 and name.startswith("layers.") and ".conv_" not in name
    }
    assert {name for name in parameters if any(part in name for part in MATRICES)} == matrices


def test_a_pattern_names_parameters_and_without_one_all_are_trained() -> None:
    model = ModelSpec(**SMALL)
    assert trained(model, []) == sizes(model)
    assert set(trained(model, ["layers.[12].*", "lm_head.weight"])) == {
        name for name in sizes(model) if name.startswith(("layers.1.", "layers.2.", "lm_head."))
    }
    assert untouched(model, []) == untouched(model, ["tok_embeddings.*"]) == 0
    assert untouched(model, ["layers.[12].*"]) == 1
    assert untouched(model, ["lm_head.*"]) == 4


def test_a_pattern_that_fits_nothing_is_a_problem_at_its_place() -> None:
    (problem,) = problems(("trainable",), ModelSpec(**SMALL), ["layers.3.*", "lm_head.weights"])
    assert problem.path == ("trainable", 1)
    assert "no parameter of this model is called 'lm_head.weights'" in str(problem)
    assert "did you mean 'lm_head.weight'?" in str(problem)


@pytest.mark.parametrize(
    ("overrides", "recipe", "message"),
    [
        (
            ["stages.pretrain.trainable=['layers.7.*']"],
            RECIPE,
            "stages.pretrain.trainable[0]: no parameter of this model is called 'layers.7.*'",
        ),
        (
            ["stages.sft.trainable=['*']", "stages.sft.lora={rank: 4, alpha: 8}"],
            CHAT,
            "stages.sft.trainable: with lora, adapters are trained",
        ),
        (
            ["stages.pretrain.trainable=['layers.*']",
             "stages.pretrain.launch={processes: 2, parallel: {pp: 2}}"],
            RECIPE,
            "launch.parallel.pp: 'pretrain' trains some parameters alone",
        ),
        (
            ["stages.sft.trainable=['norm.*']", "stages.dpo.carry=[weights, optimizer]",
             "stages.dpo.from=sft", "stages.dpo.optimizer.name=null"],
            CHAT,
            "stages.dpo.carry: 'sft' has no optimizer states of layers.0.attention.k_norm.weight",
        ),
    ],
)  # fmt: skip
def test_a_recipe_is_refused_before_anything_starts(
    tmp_path: Path, overrides: list[str], recipe: str, message: str
) -> None:
    assert message in problems_of(tmp_path, *overrides, recipe=recipe)
