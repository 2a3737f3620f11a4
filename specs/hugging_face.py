"""Converts a model to and from `config.json` of transformers' `ApertusForCausalLM`, without torch or
transformers.

Invariant: `model_of(hugging_face_config(spec, ...)) == spec`, for any context if low_freq_factor is 1;
otherwise the result has the same frequencies. Every value is written, since the defaults of transformers'
class are those of the long-context release. A model that differs from ours is refused, never approximated.
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from specs.errors import StageError
from specs.foreign import SHOWN, ForeignError, checked, explained, shown
from specs.hugging_face_files import Config, Kind
from specs.model import ModelSpec, RopeScaling

FIXED: dict[str, str | float | None] = {
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
"""Fields with a single possible value in this model. A missing field has that value."""
DIMENSIONS = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "intermediate_size": "ffn_dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "norm_eps",
    "initializer_range": "init_std",
}
SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_position",
}
THEIRS = {ours: theirs for theirs, ours in (DIMENSIONS | SCALING).items()}
"""Names of the fields of `ModelSpec` in `config.json`."""
WRITTEN = ("hidden_act", "attention_bias", "attention_dropout", "tie_word_embeddings")
"""The fields of `FIXED` that transformers' class has."""
REWARD_FIELDS: dict[str, Any] = {
    "num_labels": 1,
    "token_classification_bias": False,
    "classifier_dropout": 0.0,
    "auto_map": {
        "AutoModelForSequenceClassification": "modeling_apertus_reward.ApertusForSequenceClassification"
    },
}
"""Fields of the `config.json` of a reward model."""
RELEASED_ROPE: dict[str, str | float] = {
    "rope_type": "llama3",
    "rope_theta": 12e6,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""The default rotary embedding of transformers' `ApertusConfig`."""
LEAST_TRANSFORMERS = "4.56"
"""The first release of transformers that has the Apertus classes."""


class OwnClass(NamedTuple):
    """The classes in a file of `apertus_model/model` that compute models which transformers' Apertus class
    cannot. An export ships the file."""

    module: str
    config: str
    model: str
    model_type: str
    activation: str  # the `hidden_act` of its folders, which transformers' Apertus class refuses

    @property
    def file(self) -> str:
        return f"{self.module}.py"

    @property
    def fields(self) -> dict[str, Any]:
        """The field of `config.json` that names the code."""
        classes = {"AutoConfig": self.config, "AutoModelForCausalLM": self.model}
        return {"auto_map": {auto: f"{self.module}.{name}" for auto, name in classes.items()}}


SCHEDULED = OwnClass(
    "modeling_apertus_scheduled",
    "ScheduledApertusConfig",
    "ScheduledApertusForCausalLM",
    "apertus_scheduled",
    "xielu_in_a_layer_schedule",
)
HYBRID = OwnClass(
    "modeling_apertus_hybrid",
    "HybridApertusConfig",
    "HybridApertusForCausalLM",
    "apertus_hybrid",
    "xielu_beside_mamba_2",
)
OWN_CLASSES = (SCHEDULED, HYBRID)


def own_class(spec: ModelSpec) -> OwnClass | None:
    """The classes that compute a model; None if transformers' own Apertus class does."""
    if spec.mamba is not None:
        return HYBRID
    return None if spec.plain_stack else SCHEDULED


def own_file(spec: ModelSpec) -> str | None:
    """The file with code that an export ships: that of `own_class`, or the one that opens a reward model as a
    sequence classifier; None for any other model."""
    if (own := own_class(spec)) is not None:
        return own.file
    return "modeling_apertus_reward.py" if spec.head == "reward" else None


class HuggingFaceError(StageError):
    """An error about a Hugging Face model that cannot be read or that this program cannot compute. The
    message names field and value."""


def other_architecture(config: Any, name: str, known: Mapping[str, Collection[str]]) -> str | None:
    """The architecture of a causal language model that is not Apertus, by its `config.json`; None for
    Apertus, and for a model that an export here made from it. `known`: `model_type` -> architectures that the
    installed transformers computes by its own code. Raises HuggingFaceError for any other."""
    try:
        kind = checked(Kind, config)
    except ForeignError as error:
        raise HuggingFaceError(f"{name} cannot be read: {error}") from error
    named = kind.architectures or []
    ours = (None, "apertus", *(own.model_type for own in OWN_CLASSES))
    if kind.model_type in ours or "ApertusForCausalLM" in named:
        return None  # a folder that has to be Apertus is read by `model_of`, which names what is wrong
    architectures = known.get(str(kind.model_type), ())
    candidates = named or list(architectures)[:1]
    if (computed := next((name for name in candidates if name in architectures), None)) is not None:
        return computed
    described = f"{name} describes {shown(', '.join(named))} of model_type {shown(kind.model_type)}"
    code = "; its auto_map names code that comes with the model, which is never run" if kind.auto_map else ""
    raise HuggingFaceError(
        f"{described}, which is no causal language model of the installed transformers{code}"
    )


def not_representable(spec: ModelSpec) -> str | None:
    """Why no class of transformers or of ours computes a model; None when one does."""
    if spec.head == "reward" and own_class(spec) is not None:
        return "the files that compute other layers in transformers have no class for rewards"
    if spec.attention is not None:
        return (
            f"its attention is sparse ({spec.attention.sparse}), and the classes of transformers would load"
            " its weights and compute full attention, for which they were not trained"
        )
    if not spec.qk_norm:
        return "it has no QK-norm, which transformers' ApertusForCausalLM computes in every layer"
    if spec.activation == "xielu":
        return None
    return (
        f"its activation is {spec.activation}, but the feed-forward of transformers' ApertusForCausalLM has "
        "no gate; LlamaForCausalLM has a gate, but no QK-norm"
    )


def architecture(spec: ModelSpec) -> str:
    """The class that computes a model: one of transformers or, if it has none, one of our own. transformers
    has no class for sequence classification by Apertus; a token classifier of one output has the same
    weights, and the reward is its output at the last token."""
    if (own := own_class(spec)) is not None:
        return own.model
    return "ApertusForTokenClassification" if spec.head == "reward" else "ApertusForCausalLM"


def hugging_face_config(
    spec: ModelSpec,
    *,
    max_position_embeddings: int,
    bos_token_id: int,
    eos_token_id: int,
    pad_token_id: int | None = None,
    dtype: str = "float32",
) -> dict[str, Any]:
    """Arguments of `transformers.ApertusConfig`, or of the config of `own_class`, that describe this model;
    `max_position_embeddings`: the longest sequence that it was trained on. Raises HuggingFaceError for a
    model that neither class computes."""
    if (obstacle := not_representable(spec)) is not None:
        raise HuggingFaceError(obstacle)
    rope: dict[str, str | float] = {"rope_type": "default", "rope_theta": spec.rope_theta}
    if spec.rope_scaling is not None:
        scaling = _below(spec.rope_scaling, max_position_embeddings)
        rope |= {"rope_type": "llama3"} | {theirs: getattr(scaling, ours) for theirs, ours in SCALING.items()}
    return {
        **{theirs: getattr(spec, ours) for theirs, ours in DIMENSIONS.items()},
        **{name: FIXED[name] for name in WRITTEN},
        "max_position_embeddings": max_position_embeddings,
        "rope_parameters": rope,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "dtype": dtype,
        **(REWARD_FIELDS if spec.head == "reward" else {}),
        **_own_fields(spec),
    }


def _own_fields(spec: ModelSpec) -> dict[str, Any]:
    """The fields that the config of `own_class` has in addition to those of Apertus."""
    if (own := own_class(spec)) is None:
        return {}
    if spec.method is not None:
        made_by = spec.model_dump(mode="json", include={spec.method[0]})
        return own.fields | {"layer_schedule": _steps(spec), "layer_schedule_of": made_by}
    assert spec.mamba is not None
    mamba = {f"mamba_{field}": getattr(spec.mamba, field) for field in ("conv_width", "chunk", "decay")}
    return own.fields | {"mamba_layers": spec.mamba_layers, **mamba}


def _steps(spec: ModelSpec) -> list[list[Any]]:
    """Each step as `[layer, [state, ...]]`, then the layers beside it, the steps whose keys it reads, and
    whether it is normed; empty or false values at the end are left out."""
    steps = []
    for step in spec.schedule:
        more = [list(step.beside), list(step.reads), step.normed]
        while more and not more[-1]:
            more.pop()
        steps.append([step.layer, list(step.summed), *more])
    return steps


def _below(scaling: RopeScaling, context: int) -> RopeScaling:
    """The same frequencies with an `original_max_position` below the context, since transformers warns about
    any other value.

    Only its ratios to the two factors matter, so all three are halved until it fits, which changes no bit. If
    its half is not a whole number, it is rounded and the factors are scaled by the same ratio."""
    original = scaling.original_max_position
    while 1 < original >= context:
        original //= 2
    return _rescaled(scaling, original, original / scaling.original_max_position)


def _rescaled(scaling: RopeScaling, original: int, ratio: float) -> RopeScaling:
    low, high = scaling.low_freq_factor * ratio, scaling.high_freq_factor * ratio
    return RopeScaling(
        factor=scaling.factor, low_freq_factor=low, high_freq_factor=high, original_max_position=original
    )


def _original(scaling: RopeScaling) -> RopeScaling:
    """Inverse of `_below`, which makes `low_freq_factor` smaller than 1."""
    ratio = 1 / min(scaling.low_freq_factor, 1.0)
    return _rescaled(scaling, round(scaling.original_max_position * ratio), ratio)


def model_of(config: Any, name: str = "config.json") -> ModelSpec:
    """The model that a `config.json` describes, of this or an older release of transformers. Raises
    HuggingFaceError for another architecture, or for one that differs: the message calls the file `name`, and
    names every such field and its value."""
    try:
        kind = checked(Kind, config)
    except ForeignError as error:
        raise HuggingFaceError(f"{name} cannot be represented: {error}") from error
    architectures = kind.architectures or ["ApertusForCausalLM"]
    own = next((classes for classes in OWN_CLASSES if classes.model_type == kind.model_type), None)
    expected = ("apertus", "ApertusForCausalLM") if own is None else (own.model_type, own.model)
    if (kind.model_type, *architectures) != expected:
        raise HuggingFaceError(
            f"{name} describes {shown(', '.join(architectures))} of model_type {shown(kind.model_type)}; only"
            " ApertusForCausalLM of model_type 'apertus' can be read, and what an export here made of it"
        )
    fixed = FIXED if own is None else FIXED | {"hidden_act": own.activation}
    wrong = [
        f"{field} is {shown(config[field])}, this model computes with {shown(value)}"
        for field, value in fixed.items()
        if config.get(field, value) != value
    ]
    if config.get("auto_map") and (own is None or config["auto_map"] != own.fields["auto_map"]):
        wrong.append(f"auto_map is {shown(config['auto_map'])}; code that comes with a model is never run")
    try:
        described = checked(Config, config)
        rope = _rope(described, wrong)
    except ForeignError as error:
        wrong.append(str(error))
    if wrong:
        raise HuggingFaceError(f"{name} cannot be represented: {'; '.join(wrong)}")
    scaling = {ours: rope.get(theirs) for theirs, ours in SCALING.items()}
    values = {ours: getattr(described, theirs) for theirs, ours in DIMENSIONS.items()} | {
        "n_kv_heads": described.num_key_value_heads or described.num_attention_heads,
        "head_dim": described.head_dim or described.hidden_size // described.num_attention_heads,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": scaling if rope["rope_type"] == "llama3" else None,
    }
    if own is HYBRID:
        values["mamba"] = {
            field: getattr(described, f"mamba_{field}")
            for field in ("layers", "conv_width", "chunk", "decay")
        }
    elif own is SCHEDULED:
        values |= described.layer_schedule_of
    try:
        model = ModelSpec.model_validate(values)
    except ValidationError as error:
        raise HuggingFaceError(f"{name} cannot be represented: {explained(error, values, THEIRS)}") from error
    made_by = described.layer_schedule_of
    same = own is not SCHEDULED or (len(made_by) == 1 and _steps(model) == described.layer_schedule)
    if own_class(model) is not own or not same:
        raise HuggingFaceError(
            f"{name} cannot be represented: layer_schedule is not what layer_schedule_of makes, which is"
            f" {shown(made_by)}"
        )
    if model.rope_scaling is None:
        return model
    return model.model_copy(update={"rope_scaling": _original(model.rope_scaling)})


def older_rope(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` as the fields that transformers before release 5 reads, which ignores
    `rope_parameters` and has other defaults."""
    scaling = dict(parameters)
    return {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}


def _rope(config: Config, wrong: list[str]) -> dict[str, str | float | None]:
    """The rotary embedding: `rope_parameters`, or `rope_theta` and `rope_scaling` of older releases. Adds
    every mismatch to `wrong`."""
    theta = config.rope_theta
    ropes = [dict(rope) for rope in (config.rope_parameters, config.rope_scaling) if rope]
    if not ropes:
        if theta is not None:
            wrong.append(
                f"rope_theta is {theta!r} without rope_scaling, which releases of transformers read"
                ' differently. Fix: add its rope_scaling, or {"rope_type": "default"} if it has none'
            )
        return dict(RELEASED_ROPE)
    for rope in ropes:
        kind = rope.pop("type", None)
        rope.setdefault("rope_type", kind or "default")
        rope.setdefault("rope_theta", RELEASED_ROPE["rope_theta"] if theta is None else theta)
    rope = ropes[0]
    if rope != ropes[-1] or theta not in (None, rope["rope_theta"]):
        wrong.append(
            f"rope_parameters are {shown(config.rope_parameters)}, but rope_theta is {shown(theta)} and"
            f" rope_scaling {shown(config.rope_scaling)}, which older releases of transformers read."
            " Fix: make them equal, or delete those that are not of this model"
        )
    if rope["rope_type"] not in ("default", "llama3"):
        wrong.append(
            f"rope_type is {shown(rope['rope_type'])}, this model computes with 'default' or 'llama3'"
        )
        return rope
    needed = {"rope_type", "rope_theta"} | (set(SCALING) if rope["rope_type"] == "llama3" else set())
    wrong += [f"{name} of the rotary embedding is missing" for name in sorted(needed - rope.keys())]
    others = sorted(rope.keys() - needed)
    for name in others[:SHOWN]:
        wrong.append(
            f"{shown(name)} of the rotary embedding is {shown(rope[name])}, which this model does not have"
        )
    return rope
