"""Which class of transformers computes a model, and that it does."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch

from apertus_model.model import modeling_apertus_hybrid, modeling_apertus_scheduled
from apertus_model.model.hf import to_hugging_face
from apertus_model.model.hf_classes import classes_of, config_class, model_class
from apertus_model.model.hf_folder import modules
from apertus_model.model.hf_layers import SideBySide
from apertus_model.model.model import model_config, shapes
from apertus_model.stages.export import by_cache
from specs.hugging_face import OWN_CLASSES, HuggingFaceError, hugging_face_config, model_of
from specs.layer_schedule import DepthAverage, LayerPairs, Repeats
from specs.mamba import Mamba
from specs.model import ModelSpec
from tests.apertus_model.model.theirs import random_weights

PLAIN = ModelSpec(
    dim=48, n_layers=4, n_heads=6, n_kv_heads=2, head_dim=16, ffn_dim=96, vocab_size=256, init_std=0.3
)
LENGTH = 24


def test_a_plain_stack_is_computed_by_transformers_itself() -> None:
    assert config_class(PLAIN).__name__ == "ApertusConfig"
    assert model_class(PLAIN).__name__ == "ApertusForCausalLM"
    reward = PLAIN.model_copy(update={"head": "reward"})
    assert model_class(reward).__name__ == "ApertusForTokenClassification"


@pytest.mark.parametrize(
    "method",
    [
        {"depth_average": DepthAverage()},
        {"depth_average": DepthAverage(dilation=2, period=3)},
        {"depth_average": DepthAverage(over="layer", period=2)},
        {"layer_pairs": LayerPairs(start=1, layers=2)},
        {"layer_pairs": LayerPairs(start=0, layers=4)},
        {"layer_pairs": LayerPairs(start=1, layers=2, form="swapped")},
        {"layer_pairs": LayerPairs(start=1, layers=2, form="dropped")},
        {"layer_pairs": LayerPairs(start=0, layers=4, form="parallel")},
        {"layer_pairs": LayerPairs(start=0, layers=4, form="random", seed=3)},
        {"repeats": Repeats(start=1, layers=2, times=3)},
        {"repeats": Repeats(start=0, layers=1, times=2, keys="own", norm=False)},
        {"mamba": Mamba(layers=[0, 2], chunk=8)},
        {"mamba": Mamba(layers="all", conv_width=2, chunk=5)},
        {"mamba": Mamba(layers=[3], conv_width=1)},
        {"mamba": Mamba(layers=[1, 2], chunk=8, decay=False)},
    ],
)
def test_a_class_of_ours_gives_the_same_logits_there_with_a_cache_and_a_layer_at_a_time(
    method: dict[str, Any],
) -> None:
    spec = PLAIN.model_copy(update=method)
    weights = random_weights(shapes(spec))
    ours = model_config(spec, sequence_length=LENGTH, attention="sdpa").build()
    ours.init_weights()
    ours.load_state_dict(weights)
    numbers = hugging_face_config(spec, max_position_embeddings=LENGTH, bos_token_id=1, eos_token_id=2)
    config = config_class(spec)(**numbers)
    theirs = model_class(spec)(config).eval()
    own = (
        modeling_apertus_hybrid.HybridApertusForCausalLM
        if spec.mamba
        else modeling_apertus_scheduled.ScheduledApertusForCausalLM
    )
    assert type(theirs) is own and type(config) is own.config_class
    written = json.loads(config.to_json_string()) | {"architectures": [own.__name__]}
    numbered = spec.mamba and spec.mamba.model_copy(update={"layers": spec.mamba_layers})
    assert model_of(written) == spec.model_copy(update={"mamba": numbered})
    theirs.load_state_dict(to_hugging_face(weights), strict=True)
    tokens = torch.randint(4, 256, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = ours.eval()(tokens)
        # layers of Mamba-2 are computed by chunks that differ
        allowed = (2e-5 if spec.mamba else 2e-6) * expected.abs().max().item()
        assert (theirs(tokens).logits - expected).abs().max() < allowed
        assert (by_cache(theirs, tokens, steps=9) - expected).abs().max() < allowed
        # the attention mask of a batch with padding on the left
        padded = torch.cat([torch.full((2, 3), 3), tokens], dim=1)
        mask = torch.cat([torch.zeros(2, 3, dtype=torch.long), torch.ones_like(tokens)], dim=1)
        places = (mask.cumsum(1) - 1).clamp_min(0)
        shifted = theirs(padded, attention_mask=mask, position_ids=places).logits[:, 3:]
        assert (shifted - expected).abs().max() < allowed
    sides = SideBySide(spec, config, tokens)
    for module, members in modules(spec).items():
        difference = sides.advance(module, {name: weights[name] for name in members})
    assert torch.equal(sides.ours, expected)
    assert difference < allowed


def test_a_folder_that_an_export_did_not_write_is_refused() -> None:
    spec = PLAIN.model_copy(update={"repeats": Repeats(start=1, layers=2, times=3)})
    numbers = hugging_face_config(spec, max_position_embeddings=LENGTH, bos_token_id=1, eos_token_id=2)
    config = config_class(spec)(architectures=["ScheduledApertusForCausalLM"], **numbers)
    written = json.loads(config.to_json_string())
    assert model_of(written) == spec
    fewer = {"repeats": {"start": 1, "layers": 2, "times": 2}}
    for changes, told in (
        ({"layer_schedule": written["layer_schedule"][:-1]}, "is not what layer_schedule_of makes"),
        ({"layer_schedule_of": fewer}, "is not what layer_schedule_of makes"),
        ({"layer_schedule_of": {}}, "is not what layer_schedule_of makes"),
        ({"layer_schedule_of": written["layer_schedule_of"] | {"rope_scaling": {}}}, "is not what"),
        ({"layer_schedule_of": {"mamba": {"layers": [1]}}}, "is not what layer_schedule_of makes"),
        ({"hidden_act": "xielu"}, "hidden_act is 'xielu'"),
        ({"auto_map": {"AutoConfig": "other.Config"}}, "code that comes with a model is never run"),
        ({"architectures": ["ApertusForCausalLM"]}, "what an export here made of it"),
        ({"model_type": "apertus"}, "what an export here made of it"),
    ):
        with pytest.raises(HuggingFaceError, match=told):
            model_of(written | changes)


def test_the_specs_know_the_names_in_the_files_of_these_classes() -> None:
    for own in OWN_CLASSES:
        config, model = classes_of(own)
        assert (config.model_type, model.__name__) == (own.model_type, own.model)
        assert own.activation == sys.modules[config.__module__].STORED_ACTIVATION


def test_the_cache_of_generation_has_a_place_for_each_run_of_a_layer() -> None:
    """`generate` makes a cache with a place for each layer."""
    spec = PLAIN.model_copy(update={"n_layers": 2, "repeats": Repeats(start=0, layers=2, times=3)})
    numbers = hugging_face_config(spec, max_position_embeddings=LENGTH, bos_token_id=1, eos_token_id=2)
    theirs = model_class(spec)(config_class(spec)(**numbers)).eval()
    theirs.load_state_dict(to_hugging_face(random_weights(shapes(spec))), strict=True)
    prompt = torch.randint(4, 256, (1, 8), generator=torch.Generator().manual_seed(1))
    found = theirs.generate(
        prompt, max_new_tokens=6, do_sample=False, eos_token_id=None, return_dict_in_generate=True
    )
    assert len(found.past_key_values.layers) == 6
    assert all(layer.get_seq_length() == 13 for layer in found.past_key_values.layers)
    expected = prompt
    with torch.no_grad():
        for _ in range(6):
            logits = theirs(expected, use_cache=False).logits
            expected = torch.cat([expected, logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(found.sequences, expected)


def test_generation_keeps_a_state_of_layers_without_attention() -> None:
    """Of one size, whatever was read, and the same tokens as without it; also beam by beam."""
    spec = PLAIN.model_copy(update={"mamba": Mamba(layers=[0, 2], chunk=8)})
    numbers = hugging_face_config(spec, max_position_embeddings=LENGTH, bos_token_id=1, eos_token_id=2)
    theirs = model_class(spec)(config_class(spec)(**numbers)).eval()
    theirs.load_state_dict(to_hugging_face(random_weights(shapes(spec))), strict=True)
    prompt = torch.randint(4, 256, (2, 8), generator=torch.Generator().manual_seed(1))
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    found = theirs.generate(prompt, return_dict_in_generate=True, **settings)
    assert torch.equal(found.sequences, theirs.generate(prompt, use_cache=False, **settings))
    beams = [theirs.generate(prompt, num_beams=3, use_cache=cached, **settings) for cached in (True, False)]
    assert torch.equal(*beams)
    kept = found.past_key_values.layers
    assert [isinstance(layer, modeling_apertus_hybrid.StateLayer) for layer in kept] == [True, False] * 2
    assert [layer.get_seq_length() for layer in kept] == [13] * 4
    size = (2, spec.n_heads, spec.head_dim, spec.head_dim)
    assert kept[0].state.shape == kept[2].state.shape == size
    assert kept[0].window.shape == (2, 3, spec.query_dim + 2 * spec.key_dim)
