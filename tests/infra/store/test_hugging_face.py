"""What is known of a Hugging Face model before its weights are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infra.store.hugging_face import dense_shape, open_model
from infra.store.inputs import SourceError
from specs.hugging_face import HuggingFaceError
from specs.hugging_face_files import Stored
from tests.models import MODEL, model_folder, other_model_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "model")


def test_a_folder_states_its_model_files_and_licence(folder: Path) -> None:
    found = open_model(str(folder))
    assert found.model is not None
    assert found.model.model_copy(update={"flavour": MODEL.flavour}) == MODEL
    assert found.files == (
        "config.json",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    )
    assert (found.context, found.license, found.language) == (128, "apache-2.0", "de, rm")
    assert found.facts["url"] == str(folder)


@pytest.mark.parametrize(
    ("config", "generation", "chat"),
    [(2, None, False), (68, None, True), (68, 2, False), (2, 68, True), (2, [2, 68], True)],
)
def test_a_model_ends_its_turns_where_generation_ends_at_them(
    tmp_path: Path, config: int, generation: int | list[int] | None, chat: bool
) -> None:
    folder = model_folder(tmp_path / "model", eos=config)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert open_model(str(folder)).chat is chat


def test_weights_of_one_file_need_no_index(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()
    with pytest.raises(HuggingFaceError, match=r"has no model\.safetensors: there are no weights"):
        open_model(str(folder))
    (folder / "model.safetensors").write_bytes(b"weights")
    assert open_model(str(folder)).files == ("config.json", "model.safetensors")


def test_a_folder_that_has_weights_twice_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"other weights")
    twice = (
        r"has weights twice: transformers opens model\.safetensors, and other programs the 2 files of"
        r" model\.safetensors\.index\.json\. Fix: remove model\.safetensors, or the index"
    )
    with pytest.raises(HuggingFaceError, match=twice):
        open_model(str(folder))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    assert open_model(str(folder)).files == ("config.json", index.name, "model.safetensors")


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("config.json", SourceError, "there is no config.json in"),
        ("tokenizer.json", HuggingFaceError, "has no tokenizer.json, so the meaning of its ids is unknown"),
        (
            "model-00002-of-00002.safetensors",
            HuggingFaceError,
            "lacks 1 of 2 files that its index names, the first 'model-00002-of-00002.safetensors'",
        ),
    ],
)
def test_a_file_that_is_missing_is_named(
    folder: Path, name: str, kind: type[Exception], message: str
) -> None:
    (folder / name).unlink()
    with pytest.raises(kind, match=message):
        open_model(str(folder))


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=f"there is no folder {tmp_path}/none"):
        open_model(f"{tmp_path}/none")


def test_a_folder_of_another_architecture_states_what_can_be_asked(tmp_path: Path) -> None:
    folder = other_model_folder(tmp_path / "other")
    found = open_model(str(folder))
    assert (found.model, found.architecture, found.context) == (None, "LlamaForCausalLM", 256)
    assert (found.chat, found.license, found.weight_bytes) == (True, "apache-2.0", 6)
    (folder / "chat_template.jinja").unlink()
    assert not open_model(str(folder)).chat
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert open_model(str(folder)).chat


LLAMA = {  # 3.1 8B, which has 8,030,261,248 parameters
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14_336,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
QWEN = {  # 3 0.6B, with one matrix for both embeddings: 596,049,920 parameters
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("config", "parameters", "computed"),
    [
        (LLAMA, 8_030_261_248, 8_030_261_248),
        (LLAMA, 0, 8_030_261_248),  # weights of unknown size
        (QWEN, 596_049_920, 596_049_920 + 151_936 * 1024),
        (LLAMA, 47_000_000_000, None),  # experts
        (LLAMA | {"num_hidden_layers": None}, 8_030_261_248, None),
        (LLAMA | {"num_attention_heads": 0}, 8_030_261_248, None),
        ({"n_embd": 768}, 124_439_808, None),
    ],
)
def test_the_shape_of_a_dense_decoder_is_that_of_its_weights(
    config: dict[str, Any], parameters: int, computed: int | None
) -> None:
    shape = dense_shape(Stored.model_validate(config), 2 * parameters)
    if computed is None:
        assert shape is None
    else:
        assert shape is not None and shape.parameters == pytest.approx(computed, rel=1e-4)


@pytest.mark.parametrize(
    ("config", "context"),
    [
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_positions": 32}, 32),
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, 2**31),  # has no limit
        ({"model_type": "olmo2", "architectures": None, "max_position_embeddings": 64}, 64),
    ],
)
def test_the_context_has_the_name_that_its_architecture_gives_it(
    tmp_path: Path, config: dict[str, object], context: int
) -> None:
    folder = other_model_folder(tmp_path / "other", **({"max_position_embeddings": None} | config))
    assert open_model(str(folder)).context == context


def test_architectures_are_those_of_transformers_read_without_importing_it() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from infra.store.hugging_face import _causal_models

    theirs = {
        kind: (name,) if isinstance(name, str) else tuple(name)
        for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    }
    assert _causal_models() == theirs
