"""The Apertus model against transformers, against the published parameter counts, and against its own
promises."""

import re

import pytest
import torch

from apertus_model.model.attention import document_mask
from apertus_model.model.hf import check_constants, our_name, to_hugging_face
from apertus_model.model.model import ApertusModel, model_config
from apertus_model.model.rotation import llama3_inverse_frequencies, rope_config
from specs.hugging_face import hugging_face_config
from specs.model import ModelSpec
from tests.numerics import Numerics, largest_difference

TINY = ModelSpec(
    dim=48, n_layers=3, n_heads=6, n_kv_heads=2, head_dim=16, ffn_dim=96, vocab_size=256, init_std=0.3
)
SEQUENCE_LENGTH = 64


def build(spec: ModelSpec = TINY, seed: int = 0) -> ApertusModel:
    model = model_config(spec, sequence_length=SEQUENCE_LENGTH, attention="sdpa", seed=seed).build()
    model.init_weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # norms and scalars that are not at their neutral start
                parameter += 0.1 * torch.randn(
                    parameter.shape, generator=torch.Generator().manual_seed(len(name))
                )
    return model.eval()


def tokens(rows: int = 2, length: int = SEQUENCE_LENGTH) -> torch.Tensor:
    return torch.randint(0, TINY.vocab_size, (rows, length), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("scaled", [True, False])
def test_logits_equal_those_of_transformers(scaled: bool, numerics: Numerics) -> None:
    from transformers import ApertusConfig, ApertusForCausalLM

    spec = TINY if scaled else TINY.model_copy(update={"rope_scaling": None})
    if scaled:  # a short original context, so that all three regions of the scaling are in use
        scaling = spec.rope_scaling.model_copy(update={"original_max_position": 32})
        spec = spec.model_copy(update={"rope_scaling": scaling, "rope_theta": 1000.0})
    model = build(spec)
    config = ApertusConfig(
        **hugging_face_config(
            spec, max_position_embeddings=SEQUENCE_LENGTH, bos_token_id=1, eos_token_id=2, pad_token_id=3
        )
    )
    theirs = ApertusForCausalLM(config)
    theirs.load_state_dict(to_hugging_face(model.state_dict()), strict=True)
    with torch.no_grad():
        ours, expected = model(tokens()), theirs.eval()(tokens()).logits
    numerics(
        "model",
        f"logits of 3 layers, {'all regions of the RoPE scaling in use' if scaled else 'no RoPE scaling'}",
        source="arXiv 2509.14233, section 2.1",
        against="ApertusForCausalLM of transformers, random weights",
        difference=largest_difference(ours, expected),
        allowed=2e-5,
    )


def test_without_qk_norm_a_gated_model_is_llama(numerics: Numerics) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    spec = TINY.model_copy(update={"qk_norm": False, "activation": "swiglu", "rope_scaling": None})
    model = build(spec)
    assert not any("q_norm" in name or "k_norm" in name for name in model.state_dict())
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=6,
            num_key_value_heads=2, head_dim=16, rms_norm_eps=spec.norm_eps, rope_theta=spec.rope_theta,
        )
    )  # fmt: skip
    renamed = {
        "tok_embeddings": "model.embed_tokens", "norm": "model.norm", "lm_head": "lm_head",
        "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
        "attention.qkv_linear.wq": "self_attn.q_proj", "attention.qkv_linear.wk": "self_attn.k_proj",
        "attention.qkv_linear.wv": "self_attn.v_proj", "attention.wo": "self_attn.o_proj",
        **{f"feed_forward.{name}_proj": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
    }  # fmt: skip

    def their_name(name: str) -> str:
        if (layer := re.match(r"layers\.(\d)\.(.+)\.weight", name)) is None:
            return f"{renamed[name.removesuffix('.weight')]}.weight"
        return f"model.layers.{layer[1]}.{renamed[layer[2]]}.weight"

    theirs.load_state_dict({their_name(name): w for name, w in model.state_dict().items()}, strict=True)
    with torch.no_grad():
        ours, expected = model(tokens()), theirs.eval()(tokens()).logits
    numerics(
        "model",
        "logits of 3 layers with SwiGLU, without QK-norm",
        source="arXiv 2302.13971",
        against="LlamaForCausalLM of transformers, random weights",
        difference=largest_difference(ours, expected),
        allowed=2e-5,
    )


def test_hugging_face_names_go_there_and_back_without_loss() -> None:
    weights = build().state_dict()
    back = {our_name(name): weight for name, weight in to_hugging_face(weights).items()}
    assert back.pop(None).shape == ()  # the constants of xIELU
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weights[name]) for name in weights)


def test_a_checkpoint_with_another_xielu_constant_is_refused() -> None:
    weights = {
        name: weight for name, weight in to_hugging_face(build().state_dict()).items() if not our_name(name)
    }
    check_constants(weights)
    weights["model.layers.1.mlp.act_fn.beta"] = torch.tensor(0.25)
    with pytest.raises(ValueError, match=r"beta is 0\.25"):
        check_constants(weights)


def test_changing_one_document_never_changes_the_logits_of_its_neighbours() -> None:
    model = build()
    border = 23
    positions = torch.cat([torch.arange(border), torch.arange(SEQUENCE_LENGTH - border)]).expand(1, -1)
    original = tokens(1)
    first_changed, second_changed = original.clone(), original.clone()
    first_changed[:, :border] = (original[:, :border] + 1) % TINY.vocab_size
    second_changed[:, border:] = (original[:, border:] + 1) % TINY.vocab_size
    with torch.no_grad():
        logits = model(original, positions)
        alone = model(original[:, border:])
        assert torch.equal(model(first_changed, positions)[:, border:], logits[:, border:])
        assert torch.equal(model(second_changed, positions)[:, :border], logits[:, :border])
        assert not torch.equal(model(first_changed, positions)[:, :border], logits[:, :border])
    torch.testing.assert_close(alone, logits[:, border:], rtol=0, atol=1e-5)


def test_document_mask_is_causal_and_ends_at_borders() -> None:
    mask = document_mask(torch.tensor([[0, 1, 2, 0, 1]]))[0, 0]
    expected = torch.tensor(
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 1, 1]],
        dtype=torch.bool,
    )
    assert torch.equal(mask, expected)


@pytest.mark.parametrize(("flavour", "count"), [("8b", 8_053_338_176), ("70b", 70_599_864_480)])
def test_published_sizes_have_the_published_number_of_parameters(flavour: str, count: int) -> None:
    spec = ModelSpec(flavour=flavour)
    with torch.device("meta"):
        model = model_config(spec, sequence_length=128, attention="sdpa").build()
    assert sum(parameter.numel() for parameter in model.parameters()) == count == spec.parameters


def test_all_layers_share_one_table_of_positions_that_no_checkpoint_has() -> None:
    model = model_config(TINY, sequence_length=SEQUENCE_LENGTH, attention="sdpa").build()
    model.init_states()
    tables = [layer.attention.rope.cache for layer in model.layers.values()]
    assert len(tables) == TINY.n_layers > 1 and all(table is tables[0] for table in tables)
    assert torch.equal(tables[0], rope_config(TINY, SEQUENCE_LENGTH).build().cache)
    assert not any("rope" in name for name in model.state_dict())


def test_rope_scaling_keeps_short_wavelengths_and_stretches_long_ones() -> None:
    frequencies = llama3_inverse_frequencies(rope_config(ModelSpec(flavour="8b"), 16))
    plain = llama3_inverse_frequencies(rope_config(ModelSpec(flavour="8b", rope_scaling=None), 16))
    wavelengths = 2 * torch.pi / plain
    assert torch.equal(frequencies[wavelengths < 8192 / 4], plain[wavelengths < 8192 / 4])
    torch.testing.assert_close(frequencies[wavelengths > 8192], plain[wavelengths > 8192] / 8)
