"""SwiGLU as the other feed-forward: transformers' formula, counted right, split right, and never exported
as something else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import softplus

from apertus_model.model.feed_forward import INITIAL_ALPHA_N, INITIAL_ALPHA_P, XIELU
from apertus_model.model.model import ApertusModel, model_config
from flows.planning.plan import make
from infra.store import Store
from specs.errors import SpecError
from specs.hugging_face import HuggingFaceError, hugging_face_config
from specs.model import ModelSpec
from specs.recipe import load
from tests.models import flops_per_token
from tests.numerics import Numerics, largest_difference
from tests.recipes import write_recipe

GATED = ModelSpec(
    dim=48,
    n_layers=2,
    n_heads=6,
    n_kv_heads=2,
    head_dim=16,
    ffn_dim=80,
    vocab_size=256,
    init_std=0.3,
    activation="swiglu",
)


def build(spec: ModelSpec) -> ApertusModel:
    model = model_config(spec, sequence_length=32, attention="sdpa", seed=3).build()
    model.init_weights()
    return model


def test_the_feed_forward_is_that_of_llama() -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    block = build(GATED).layers["0"].feed_forward
    assert block.gate_proj is not None
    theirs = LlamaMLP(
        LlamaConfig(
            hidden_size=48, intermediate_size=80, num_attention_heads=6, hidden_act="silu", mlp_bias=False
        )
    )
    theirs.load_state_dict(block.state_dict(), strict=True)  # three matrices under the same names
    x = torch.randn(2, 32, 48, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(block(x), theirs(x), rtol=0, atol=1e-6)


def test_parameters_are_counted_as_they_are_built() -> None:
    assert sum(parameter.numel() for parameter in build(GATED).parameters()) == GATED.parameters


def test_two_thirds_of_the_width_are_as_many_parameters_and_flops() -> None:
    xielu = ModelSpec(flavour="1.5b")
    swiglu = ModelSpec(flavour="1.5b", activation="swiglu", ffn_dim=8192)
    assert xielu.parameters - swiglu.parameters == 2 * xielu.n_layers
    assert flops_per_token(xielu, 4096) == flops_per_token(swiglu, 4096)


def test_xielu_is_neutral_and_swiglu_is_identity() -> None:
    assert "activation" not in ModelSpec(flavour="mini").identity_fields()
    assert ModelSpec(flavour="mini", activation="swiglu").identity_fields()["activation"] == "swiglu"


def test_a_gated_model_has_no_form_as_apertus() -> None:
    with pytest.raises(HuggingFaceError, match="its activation is swiglu"):
        hugging_face_config(GATED, max_position_embeddings=32, bos_token_id=1, eos_token_id=2)


def test_a_plan_refuses_to_export_one(tmp_path: Path) -> None:
    recipe = load(write_recipe(tmp_path), ["stages.pretrain.model.activation=swiglu"])
    with pytest.raises(
        SpecError,
        match=(
            r"stages\.export\.from: the model cannot become a Hugging Face folder: its activation is swiglu"
        ),
    ):
        make(recipe, Store.open(str(tmp_path / "store")))


def test_xielu_follows_its_formula_in_float64(numerics: Numerics) -> None:
    activation = XIELU(XIELU.Config())
    with torch.no_grad():
        activation.alpha_p.fill_(0.3)
        activation.alpha_n.fill_(-0.7)
    x = torch.linspace(-6, 6, 241, dtype=torch.float64)
    alpha_p = torch.log1p(torch.exp(torch.tensor(0.3, dtype=torch.float64)))
    alpha_n = 0.5 + torch.log1p(torch.exp(torch.tensor(-0.7, dtype=torch.float64)))
    expected = torch.where(
        x > 0, alpha_p * x**2 + 0.5 * x, alpha_n * (torch.expm1(x.clamp(max=-1e-6)) - x) + 0.5 * x
    )
    numerics(
        "model",
        "xIELU from -6 to 6, relative above 1",
        source="arXiv 2411.13010",
        against="the published form in float64, which its eps of -1e-6 moves by 1e-6 a_n at 0",
        difference=largest_difference(activation(x.float()), expected, relative_above=1.0),
        allowed=1e-6,
    )


def test_the_gradient_of_xielu_is_that_of_its_formula(numerics: Numerics) -> None:
    activation = XIELU(XIELU.Config()).double()
    with torch.no_grad():
        activation.alpha_p.fill_(0.3)
        activation.alpha_n.fill_(-0.7)
    x = torch.tensor([-3.0, -0.5, -1e-3, 1e-3, 0.5, 3.0], dtype=torch.float64, requires_grad=True)
    weights = torch.arange(1.0, 7.0, dtype=torch.float64)
    (activation(x) * weights).sum().backward()
    alpha_p, alpha_n = (torch.tensor([v], dtype=torch.float64, requires_grad=True) for v in (0.3, -0.7))
    slope_p, slope_n = nn.functional.softplus(alpha_p), 0.5 + nn.functional.softplus(alpha_n)
    y = x.detach().clone().requires_grad_()
    plain = torch.where(y > 0, slope_p * y**2, slope_n * (torch.expm1(y.clamp(max=-1e-6)) - y)) + 0.5 * y
    (plain * weights).sum().backward()
    truth = {"source": "arXiv 2411.13010", "against": "autograd through the formula in float64"}
    numerics(
        "model",
        "gradient of xIELU by its input, float64, relative",
        **truth,
        difference=largest_difference(x.grad, y.grad, relative_above=0.0),
        allowed=1e-12,
    )
    numerics(
        "model",
        "gradient of xIELU by its scalars, float64 summed in float32, relative",
        **truth,
        difference=largest_difference(
            [activation.alpha_p.grad, activation.alpha_n.grad],
            [alpha_p.grad, alpha_n.grad],
            relative_above=0.0,
        ),
        allowed=1e-6,
    )


def test_both_slopes_of_a_new_xielu_are_0_8_and_rounding_makes_the_published_ones() -> None:
    exact = [INITIAL_ALPHA_P, INITIAL_ALPHA_N]
    slopes = [softplus(torch.tensor(scalar, dtype=torch.float64)).item() for scalar in exact]
    assert [slopes[0], 0.5 + slopes[1]] == pytest.approx([0.8, 0.8], rel=1e-15)
    published = [(torch.tensor(value, dtype=torch.bfloat16).exp() - 1).log() for value in (0.8, 0.8 - 0.5)]
    assert [scalar.item() for scalar in published] == [0.2109375, -1.046875]
    assert exact == pytest.approx([0.20338, -1.05023], abs=1e-5)
