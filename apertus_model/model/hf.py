"""The Hugging Face face of a model: names of weights and content of `config.json`.

Both sides keep query and key weights in the rotate-half layout, so the mapping renames and copies nothing else.

Invariant: `from_hugging_face(to_hugging_face(weights)) == weights`, name by name and bit by bit. Names and config as in
transformers' `ApertusForCausalLM`; its config defaults are those of the long-context release, so every value is written.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch

from apertus_model.model.xielu import BETA, EPS
from specs.model import ModelSpec

_TOP_NAMES = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attention_norm.weight": "attention_layernorm.weight",
    "attention.qkv_linear.wq.weight": "self_attn.q_proj.weight",
    "attention.qkv_linear.wk.weight": "self_attn.k_proj.weight",
    "attention.qkv_linear.wv.weight": "self_attn.v_proj.weight",
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "feedforward_layernorm.weight",
    "feed_forward.up_proj.weight": "mlp.up_proj.weight",
    "feed_forward.act.alpha_p": "mlp.act_fn.alpha_p",
    "feed_forward.act.alpha_n": "mlp.act_fn.alpha_n",
    "feed_forward.down_proj.weight": "mlp.down_proj.weight",
}
_LAYER_NAMES_BACK = {theirs: ours for ours, theirs in _LAYER_NAMES.items()}
_TOP_NAMES_BACK = {theirs: ours for ours, theirs in _TOP_NAMES.items()}
_CONSTANT_BUFFERS = {"mlp.act_fn.beta": BETA, "mlp.act_fn.eps": EPS}


def to_hugging_face(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights under the names of `ApertusForCausalLM`, with the constant buffers of xIELU, which it stores as weights.

    Raises:
        KeyError: a weight that has no counterpart.
    """
    renamed: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        layer = re.match(r"layers\.(\d+)\.(.+)", name)
        if layer is None:
            renamed[_TOP_NAMES[name]] = weight
            continue
        prefix = f"model.layers.{layer[1]}."
        renamed[prefix + _LAYER_NAMES[layer[2]]] = weight
        for buffer, value in _CONSTANT_BUFFERS.items():
            renamed.setdefault(prefix + buffer, torch.tensor(value, dtype=weight.dtype))
    return renamed


def from_hugging_face(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights under our names; the constant buffers are dropped after a check that they are the constants of this model.

    Raises:
        KeyError: a weight that has no counterpart.
        ValueError: an xIELU with another beta or eps.
    """
    renamed: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        layer = re.match(r"model\.layers\.(\d+)\.(.+)", name)
        if layer is None:
            renamed[_TOP_NAMES_BACK[name]] = weight
        elif layer[2] in _CONSTANT_BUFFERS:
            constant = torch.tensor(_CONSTANT_BUFFERS[layer[2]], dtype=weight.dtype)
            if not torch.equal(weight.cpu(), constant):
                raise ValueError(f"{name} is {weight.item()}, this model computes xIELU with {constant.item()}")
        else:
            renamed[f"layers.{layer[1]}.{_LAYER_NAMES_BACK[layer[2]]}"] = weight
    return renamed


def hugging_face_config(
    spec: ModelSpec,
    *,
    max_position_embeddings: int,
    bos_token_id: int,
    eos_token_id: int,
    pad_token_id: int | None = None,
    dtype: str = "float32",
) -> dict[str, Any]:
    """Arguments of `transformers.ApertusConfig` that describe this model.

    Args:
        spec: dimensions.
        max_position_embeddings: longest sequence the model was trained on, in tokens.
        bos_token_id: id of the begin-of-document token.
        eos_token_id: id of the end-of-document token.
        pad_token_id: id of the padding token, if there is one.
        dtype: dtype of the stored weights.
    """
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": spec.rope_theta}
    if spec.rope_scaling is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": spec.rope_scaling.factor,
            "low_freq_factor": spec.rope_scaling.low_freq_factor,
            "high_freq_factor": spec.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": spec.rope_scaling.original_max_position,
        }
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.dim,
        "intermediate_size": spec.ffn_dim,
        "num_hidden_layers": spec.n_layers,
        "num_attention_heads": spec.n_heads,
        "num_key_value_heads": spec.n_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "xielu",
        "max_position_embeddings": max_position_embeddings,
        "initializer_range": spec.init_std,
        "rms_norm_eps": spec.norm_eps,
        "rope_parameters": rope,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "dtype": dtype,
    }
