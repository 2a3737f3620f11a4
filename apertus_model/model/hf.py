"""The names of a model's weights in transformers' `ApertusForCausalLM`, and of a reward model's weights in
its `ApertusForTokenClassification`.

Both sides keep query and key weights in the rotate-half layout, so the mapping only renames weights, without
copies. The config is mapped by `specs.hugging_face`, files are read and written by
`apertus_model.model.hf_folder`.

Invariant: `our_name(hugging_face_name(name)) == name` for every weight.
"""

import re
from collections.abc import Mapping

import torch

from apertus_model.model.feed_forward import BETA, EPS
from apertus_model.model.output import REWARD_HEAD
from specs.hugging_face import HuggingFaceError
from specs.mamba import OWN

_TOP_NAMES = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
    REWARD_HEAD: "score.weight",
}
_LAYER_NAMES = {
    "attention_norm.weight": "attention_layernorm.weight",
    "attention.qkv_linear.wq.weight": "self_attn.q_proj.weight",
    "attention.qkv_linear.wk.weight": "self_attn.k_proj.weight",
    "attention.qkv_linear.wv.weight": "self_attn.v_proj.weight",
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    **{f"attention.{name}": f"self_attn.{name}" for name in OWN},
    "ffn_norm.weight": "feedforward_layernorm.weight",
    "feed_forward.up_proj.weight": "mlp.up_proj.weight",
    "feed_forward.act.alpha_p": "mlp.act_fn.alpha_p",
    "feed_forward.act.alpha_n": "mlp.act_fn.alpha_n",
    "feed_forward.down_proj.weight": "mlp.down_proj.weight",
}
_LAYER_NAMES_BACK = {theirs: ours for ours, theirs in _LAYER_NAMES.items()}
_TOP_NAMES_BACK = {theirs: ours for ours, theirs in _TOP_NAMES.items()}
_CONSTANT_BUFFERS = {"mlp.act_fn.beta": BETA, "mlp.act_fn.eps": EPS}
CONSTANTS = tuple(f".{name}" for name in _CONSTANT_BUFFERS)
"""The ends of the names of the constants of xIELU, which transformers stores as weights."""


def hugging_face_name(name: str) -> str:
    """Our name of a weight -> its name in transformers. KeyError for a weight without a counterpart."""
    if name.startswith("schedule."):
        return f"model.{name}"
    layer = re.match(r"layers\.(\d+)\.(.+)", name)
    return _TOP_NAMES[name] if layer is None else f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}"


def our_name(name: str) -> str | None:
    """Name of a weight in transformers -> our name; None for a constant of xIELU, which transformers stores
    as a weight. KeyError for an unknown name."""
    if name.startswith("model.schedule."):
        return name.removeprefix("model.")
    layer = re.match(r"model\.layers\.(\d+)\.(.+)", name)
    if layer is None:
        return _TOP_NAMES_BACK[name]
    return None if layer[2] in _CONSTANT_BUFFERS else f"layers.{layer[1]}.{_LAYER_NAMES_BACK[layer[2]]}"


def constant(name: str, dtype: torch.dtype) -> torch.Tensor:
    """The stored scalar of an xIELU constant by its name in transformers, `...mlp.act_fn.{beta,eps}`."""
    value = next(value for suffix, value in _CONSTANT_BUFFERS.items() if name.endswith(suffix))
    return torch.tensor(value, dtype=dtype)


def to_hugging_face(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights under the names of `ApertusForCausalLM`, with the constants of xIELU, which it stores as
    weights. KeyError for a weight without a counterpart."""
    renamed: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        theirs = hugging_face_name(name)
        renamed[theirs] = weight
        if theirs.startswith("model.layers."):
            prefix = ".".join(theirs.split(".")[:3])
            for buffer in _CONSTANT_BUFFERS:
                renamed.setdefault(f"{prefix}.{buffer}", constant(buffer, weight.dtype))
    return renamed


def check_constants(weights: Mapping[str, torch.Tensor]) -> None:
    """Raises HuggingFaceError when a constant of xIELU, by its name in transformers, is not this model's."""
    for name, weight in weights.items():
        if weight.numel() != 1 or weight.cpu().reshape(()) != constant(name, weight.dtype):
            raise HuggingFaceError(
                f"{name} is {weight.tolist()}, this model computes xIELU with"
                f" {constant(name, weight.dtype).item()}"
            )
