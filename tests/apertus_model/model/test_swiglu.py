"""SwiGLU as the other feed-forward: transformers' formula, counted right, split right, and never exported as something else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from apertus_model.model.model import ApertusModel, GatedFeedForward, model_config
from flows.planning.plan import make
from infra.store import Store
from specs.errors import SpecError
from specs.hugging_face import HuggingFaceError, hugging_face_config
from specs.model import ModelSpec
from specs.recipe import load
from tests.recipes import write_recipe

GATED = ModelSpec(dim=48, n_layers=2, n_heads=6, n_kv_heads=2, head_dim=16, ffn_dim=80, vocab_size=256, init_std=0.3, activation="swiglu")


def build(spec: ModelSpec) -> ApertusModel:
    model = model_config(spec, sequence_length=32, attention="sdpa", seed=3).build()
    model.init_weights()
    return model


def test_the_feed_forward_is_that_of_llama() -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    block = build(GATED).layers["0"].feed_forward
    assert isinstance(block, GatedFeedForward)
    theirs = LlamaMLP(LlamaConfig(hidden_size=48, intermediate_size=80, num_attention_heads=6, hidden_act="silu", mlp_bias=False))
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
    assert xielu.flops_per_token(4096) == swiglu.flops_per_token(4096)


def test_xielu_is_neutral_and_swiglu_is_identity() -> None:
    assert "activation" not in ModelSpec(flavour="mini").identity_fields()
    assert ModelSpec(flavour="mini", activation="swiglu").identity_fields()["activation"] == "swiglu"


def test_a_gated_model_has_no_form_as_apertus() -> None:
    with pytest.raises(HuggingFaceError, match="its activation is swiglu"):
        hugging_face_config(GATED, max_position_embeddings=32, bos_token_id=1, eos_token_id=2)


def test_a_plan_refuses_to_export_one(tmp_path: Path) -> None:
    recipe = load(write_recipe(tmp_path), ["stages.pretrain.model.activation=swiglu"])
    with pytest.raises(SpecError, match=r"stages\.export\.from: the model cannot become a Hugging Face folder: its activation is swiglu"):
        make(recipe, Store.open(str(tmp_path / "store")))
