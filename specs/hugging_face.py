"""A model as `config.json` of transformers' `ApertusForCausalLM`, in both directions; torch and transformers are not needed for it.

Invariant: `model_of(hugging_face_config(spec, ...)) == spec`, for any context where low_freq_factor is 1; with another one it
is a model of the same frequencies. Every value is written, since the defaults of transformers' class are those of the
long-context release; and a config that describes something else than this model computes is refused, never approximated.
"""

from __future__ import annotations

from typing import Any

from specs.errors import StageError
from specs.model import ModelSpec, RopeScaling

FIXED: dict[str, Any] = {
    "hidden_act": "xielu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "qk_norm": True,
    "post_norm": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "sliding_window": None,
    "quantization_config": None,
}
"""Fields that this model has one value for. One that is left out has it."""
DIMENSIONS = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "intermediate_size": "ffn_dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
}
SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_position",
}
RELEASED_ROPE = {"rope_type": "llama3", "rope_theta": 12e6, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | {
    "original_max_position_embeddings": 8192
}
"""What transformers' `ApertusConfig` computes with where a config states nothing."""


class HuggingFaceError(StageError):
    """A Hugging Face model that cannot be read, or is not one that this program can compute. The message names what and the value."""


def not_representable(spec: ModelSpec) -> str | None:
    """Why a model has no form as `ApertusForCausalLM`; None when it has one."""
    if spec.activation == "xielu":
        return None
    return (
        f"its activation is {spec.activation}, and transformers' ApertusForCausalLM has a feed-forward without a gate; LlamaForCausalLM "
        "has one, and no QK-norm"
    )


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

    Raises:
        HuggingFaceError: a model that `ApertusForCausalLM` cannot compute.
    """
    if (obstacle := not_representable(spec)) is not None:
        raise HuggingFaceError(obstacle)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": spec.rope_theta}
    if spec.rope_scaling is not None:
        scaling = _below(spec.rope_scaling, max_position_embeddings)
        rope |= {"rope_type": "llama3"} | {theirs: getattr(scaling, ours) for theirs, ours in SCALING.items()}
    return {
        **{theirs: getattr(spec, ours) for theirs, ours in DIMENSIONS.items()},
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


def _below(scaling: RopeScaling, context: int) -> RopeScaling:
    """The same frequencies, with an `original_max_position` below the context: transformers warns of any other.

    Only its ratios to the two factors count, so all three are halved until it fits, which changes no bit. Where half of
    it is no whole number, the factors follow its rounding."""
    original = scaling.original_max_position
    while 1 < original >= context:
        original //= 2
    return _rescaled(scaling, original, original / scaling.original_max_position)


def _rescaled(scaling: RopeScaling, original: int, ratio: float) -> RopeScaling:
    low, high = scaling.low_freq_factor * ratio, scaling.high_freq_factor * ratio
    return RopeScaling(factor=scaling.factor, low_freq_factor=low, high_freq_factor=high, original_max_position=original)


def _scaling(rope: dict[str, Any]) -> RopeScaling:
    """What a config states. A `low_freq_factor` below 1 is from `_below`, and undone."""
    scaling = RopeScaling(**{ours: rope[theirs] for theirs, ours in SCALING.items()})
    ratio = 1 / min(scaling.low_freq_factor, 1.0)
    return _rescaled(scaling, round(scaling.original_max_position * ratio), ratio)


def model_of(config: dict[str, Any]) -> ModelSpec:
    """The model that a `config.json` describes, of this or an older release of transformers.

    Raises:
        HuggingFaceError: it is not an `ApertusForCausalLM`, or one that differs from this model; names every such field and its value.
    """
    architectures = config.get("architectures") or ["ApertusForCausalLM"]
    if config.get("model_type") != "apertus" or architectures != ["ApertusForCausalLM"]:
        raise HuggingFaceError(
            f"config.json describes {', '.join(map(str, architectures))} of model_type {config.get('model_type')!r}; only "
            "ApertusForCausalLM of model_type 'apertus' can be read"
        )
    wrong = [
        f"{name} is {config[name]!r}, this model computes with {value!r}"
        for name, value in FIXED.items()
        if config.get(name, value) != value
    ]
    if config.get("auto_map"):
        wrong.append(f"auto_map is {config['auto_map']!r}, and code that comes with a model is never run")
    wrong += [f"{name} is missing" for name in DIMENSIONS if name not in config]
    rope = _rope(config, wrong)
    if wrong:
        raise HuggingFaceError(f"config.json cannot be represented: {'; '.join(wrong)}")
    heads = config["num_attention_heads"]
    scaled = rope["rope_type"] == "llama3"
    try:
        return ModelSpec(
            **{ours: config[theirs] for theirs, ours in DIMENSIONS.items()},
            n_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            rope_theta=rope["rope_theta"],
            rope_scaling=_scaling(rope) if scaled else None,
            norm_eps=config.get("rms_norm_eps", 1e-5),
            init_std=config.get("initializer_range", 0.02),
        )
    except (ValueError, TypeError, KeyError) as error:
        raise HuggingFaceError(f"config.json cannot be represented: {error}") from error


def _rope(config: dict[str, Any], wrong: list[str]) -> dict[str, Any]:
    """The rotary embedding: `rope_parameters`, or `rope_theta` and `rope_scaling` of older releases. Adds to `wrong` what does not fit."""
    stated = config.get("rope_parameters") or config.get("rope_scaling")
    if stated is None and "rope_theta" in config:
        wrong.append(f"rope_theta is {config['rope_theta']!r} without rope_scaling, which releases of transformers read differently")
    rope: dict[str, Any] = dict(stated or RELEASED_ROPE)
    kind = rope.pop("type", None)
    rope.setdefault("rope_type", kind or "default")
    rope.setdefault("rope_theta", config.get("rope_theta", RELEASED_ROPE["rope_theta"]))
    if rope["rope_type"] not in ("default", "llama3"):
        wrong.append(f"rope_type is {rope['rope_type']!r}, this model computes with 'default' or 'llama3'")
        return rope
    needed = {"rope_type", "rope_theta"} | (set(SCALING) if rope["rope_type"] == "llama3" else set())
    wrong += [f"{name} of the rotary embedding is missing" for name in sorted(needed - rope.keys())]
    wrong += [f"{name} of the rotary embedding is {rope[name]!r}, which this model does not have" for name in sorted(rope.keys() - needed)]
    return rope
