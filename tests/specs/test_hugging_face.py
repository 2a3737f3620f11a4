"""`config.json` in both directions, against what the released models carry and against transformers."""

import json
from pathlib import Path
from typing import Any

import pytest

from specs.hugging_face import HuggingFaceError, hugging_face_config, model_of, older_rope
from specs.model import FLAVOURS, ModelSpec, RopeScaling

RELEASED_8B: dict[str, Any] = {
    "vocab_size": 131_072, "hidden_size": 4096, "intermediate_size": 21_504, "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8, "hidden_act": "xielu", "max_position_embeddings": 65_536, "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "attention_dropout": 0.0, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 3,
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 12_000_000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
"""apertus_recipe.md, section 1: the values of the release, not those of our code."""
RELEASED_70B = RELEASED_8B | {
    "hidden_size": 8192,
    "intermediate_size": 43_008,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}


def exported(spec: ModelSpec, **changes: Any) -> dict[str, Any]:
    """What transformers writes into the folder."""
    from transformers import ApertusConfig

    tokens = {
        "max_position_embeddings": 65_536,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
    } | changes
    config = ApertusConfig(architectures=["ApertusForCausalLM"], **hugging_face_config(spec, **tokens))
    document: dict[str, Any] = json.loads(config.to_json_string())
    return document


@pytest.mark.parametrize(("flavour", "released"), [("8b", RELEASED_8B), ("70b", RELEASED_70B)])
def test_the_config_of_a_published_size_has_the_fields_of_the_release(
    flavour: str, released: dict[str, Any]
) -> None:
    document = exported(ModelSpec(flavour=flavour, rope_theta=12e6))
    assert {name: document[name] for name in released} == released
    assert (document["model_type"], document["architectures"]) == ("apertus", ["ApertusForCausalLM"])
    assert document["head_dim"] == 128


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_model_goes_to_a_config_and_back(flavour: str, scaled: bool) -> None:
    spec = ModelSpec(
        flavour=flavour,
        rope_theta=4e6,
        rope_scaling=RopeScaling(factor=32.0) if scaled else None,
        norm_eps=1e-6,
    )
    assert model_of(exported(spec)).identity_fields() == spec.identity_fields()


CONTEXTS = [8, 48, 64, 1000, 4096, 8192, 8193, 65_536]


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_model_of_any_context_goes_to_a_config_and_back_without_a_warning(
    context: int, transformers_log: pytest.LogCaptureFixture
) -> None:
    spec = ModelSpec(flavour="mini")
    document = exported(spec, max_position_embeddings=context)
    assert transformers_log.messages == []
    assert document["max_position_embeddings"] == context
    assert document["rope_parameters"]["original_max_position_embeddings"] == min(
        8192, 2 ** ((context - 1).bit_length() - 1)
    )
    assert model_of(document).identity_fields() == spec.identity_fields()


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize(
    "scaling",
    [RopeScaling(), RopeScaling(factor=32, original_max_position=6000), RopeScaling(low_freq_factor=0.5)],
)
def test_the_frequencies_of_a_config_are_those_of_training(context: int, scaling: RopeScaling) -> None:
    import torch
    from transformers import ApertusConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    spec = ModelSpec(flavour="8b", rope_scaling=scaling)

    def frequencies(length: int) -> torch.Tensor:
        config = ApertusConfig(
            **hugging_face_config(spec, max_position_embeddings=length, bos_token_id=1, eos_token_id=2)
        )
        return ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]

    trained = frequencies(2**20)  # as the spec states them
    exact = scaling.original_max_position == 8192
    assert (
        torch.equal(frequencies(context), trained)
        if exact
        else torch.allclose(frequencies(context), trained, rtol=1e-6, atol=0)
    )


RELEASED_ROPE: dict[str, Any] = RELEASED_8B["rope_parameters"]
SCALING = {name: value for name, value in RELEASED_ROPE.items() if name not in ("rope_theta", "rope_type")}
OLDER = {"rope_theta": 12e6, "rope_scaling": SCALING | {"type": "llama3"}}
PLAIN = {"rope_theta": 5e5, "rope_scaling": {"rope_type": "default"}}


@pytest.mark.parametrize("both", [False, True], ids=["older keys", "both"])
@pytest.mark.parametrize("older", [OLDER, PLAIN], ids=["llama3", "default"])
def test_a_config_of_an_older_release_of_transformers_is_understood(
    older: dict[str, Any], both: bool
) -> None:
    spec = ModelSpec(flavour="8b", rope_theta=older["rope_theta"])
    spec = spec if older is OLDER else spec.model_copy(update={"rope_scaling": None})
    changes = {"qk_norm": True, "post_norm": False, "mlp_bias": False, "initializer_range": 0.008944}
    document = exported(spec) | older | changes
    if not both:
        del document["rope_parameters"]
    assert model_of(document).identity_fields() == spec.identity_fields()


@pytest.mark.parametrize("scaling", [None, RopeScaling(), RopeScaling(factor=32)])
def test_the_older_keys_are_what_transformers_makes_the_rotary_embedding_of(
    scaling: RopeScaling | None,
) -> None:
    from transformers import ApertusConfig

    document = exported(ModelSpec(flavour="8b", rope_theta=5e5, rope_scaling=scaling))
    newer = document.pop("rope_parameters")
    assert ApertusConfig(**document, **older_rope(newer)).rope_parameters == newer


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": OLDER["rope_scaling"]},
        {"rope_scaling": OLDER["rope_scaling"] | {"factor": 32.0}},
        {"rope_theta": 12e6, "rope_scaling": {"rope_type": "default"}},
        {"rope_theta": 12e6, "rope_scaling": OLDER["rope_scaling"] | {"rope_theta": 5e5}},
    ],
    ids=str,
)
def test_a_config_that_states_two_rotary_embeddings_is_refused(changes: dict[str, Any]) -> None:
    message = r"rope_parameters are .*, but rope_theta is .* and rope_scaling .*Fix: make them equal"
    with pytest.raises(HuggingFaceError, match=message):
        model_of(exported(ModelSpec(flavour="8b", rope_theta=12e6)) | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias is true, this model computes with false"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is true"),
        ({"hidden_act": "silu"}, "hidden_act is 'silu', this model computes with 'xielu'"),
        ({"qk_norm": False}, "qk_norm is false"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "code that comes with a model is never run"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "rope_type is 'yarn'"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "'partial_rotary_factor' of",
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}},
            "factor of the rotary embedding is missing",
        ),
        ({"rope_parameters": None, "rope_theta": 5e5}, "rope_theta is 500000.0 without rope_scaling"),
        ({"model_type": "llama"}, "model_type 'llama'"),
        ({"architectures": ["ApertusForSequenceClassification"]}, "ApertusForSequenceClassification"),
        ({"vocab_size": 0}, "vocab_size is 0: not above 0"),
        ({"num_key_value_heads": 5}, "n_heads 32 is not a multiple of n_kv_heads 5"),
    ],
)
def test_what_this_model_cannot_represent_is_refused_with_field_and_value(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(HuggingFaceError) as caught:
        model_of(exported(ModelSpec(flavour="8b")) | changes)
    assert message in str(caught.value)


def test_a_vocabulary_may_have_any_size() -> None:
    with_added_tokens = ModelSpec(flavour="8b", vocab_size=131_073)
    assert model_of(exported(with_added_tokens)) == with_added_tokens.model_copy(update={"flavour": None})


def test_all_that_does_not_fit_is_named_at_once() -> None:
    with pytest.raises(HuggingFaceError, match=r"hidden_act is 'gelu'.*attention_bias is true"):
        model_of(RELEASED_8B | {"model_type": "apertus", "hidden_act": "gelu", "attention_bias": True})


def test_mapping_a_config_needs_no_torch() -> None:
    import subprocess
    import sys

    program = (
        "import sys, infra.store.hugging_face; assert not {'torch', 'transformers', 'numpy'} &"
        " set(sys.modules); print('light')"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "light\n", done.stderr
