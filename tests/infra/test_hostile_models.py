"""Models and tokenizers of Hugging Face that try to run code, or to be read from elsewhere, are refused."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from apertus_model.chat.encoder import ChatError
from apertus_model.generation import TransformersGenerator
from apertus_model.prompt_format import OwnFormat
from infra.store.hugging_face import open_model
from specs.stages.preference_data import Sampling
from tests.infra.hostile import Calls, edit

CONFIG = {
    "architectures": ["ApertusForCausalLM"],
    "model_type": "apertus",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
}
CONFIG |= {
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
}
CONFIG |= {"hidden_act": "xielu", "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}


@pytest.fixture
def hugging_face(tmp_path: Path, planted: Path) -> Path:
    """A model of transformers' own making, with a program beside it."""
    from tokenizers import Tokenizer, models
    from transformers import ApertusConfig, ApertusForCausalLM

    folder = tmp_path / "model"
    ApertusForCausalLM(
        ApertusConfig(**{key: value for key, value in CONFIG.items() if key != "architectures"})
    ).save_pretrained(folder)
    Tokenizer(models.BPE()).save(str(folder / "tokenizer.json"))
    program = (
        f"open({str(planted)!r}, 'w').close()\nfrom transformers import ApertusForCausalLM as Evil,"
        " ApertusConfig as EvilConfig\n"
    )
    (folder / "evil.py").write_text(program)
    return folder


AUTO_MAP = {
    "AutoConfig": "evil.EvilConfig",
    "AutoModelForCausalLM": "evil.Evil",
    "AutoTokenizer": ["evil.Evil", "evil.Evil"],
}


def generator(folder: Path) -> TransformersGenerator:
    written: Any = SimpleNamespace(end_ids=(2,), pad_id=3)
    return TransformersGenerator(folder, Sampling(max_new_tokens=1), written)


@pytest.mark.parametrize("model_type", ["apertus", "evil"])
def test_code_that_comes_with_a_model_is_not_run(hugging_face: Path, planted: Path, model_type: str) -> None:
    edit(hugging_face, "config.json", auto_map=AUTO_MAP, model_type=model_type)
    edit(hugging_face, "tokenizer_config.json", auto_map=AUTO_MAP, tokenizer_class="Evil")
    if model_type == "apertus":
        generator(hugging_face)  # opened as transformers' own
        with pytest.raises(ChatError):  # its tokenizer knows no turns
            OwnFormat(hugging_face / "tokenizer.json", 2, 3)
    else:
        with pytest.raises(ValueError, match=r"evil|custom code"):
            generator(hugging_face)
        with pytest.raises(ValueError, match="evil"):
            open_model(str(hugging_face))
    assert not planted.exists()


def test_a_pickle_of_weights_is_not_read(hugging_face: Path, planted: Path) -> None:
    (hugging_face / "model.safetensors").unlink()
    torch.save(Calls(os.system, f"touch {planted}"), hugging_face / "pytorch_model.bin")
    with pytest.raises(ValueError, match="a pickle, which is never read"):
        open_model(str(hugging_face))
    with pytest.raises(OSError, match="safetensors"):
        generator(hugging_face)
    assert not planted.exists()


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "pytorch_model.bin"])
def test_the_index_of_weights_names_files_of_the_folder(
    hugging_face: Path, tmp_path: Path, file: str
) -> None:
    from apertus_model.model.hf_folder import FolderWeights
    from specs.hugging_face import HuggingFaceError

    spec = open_model(str(hugging_face)).model
    os.rename(hugging_face / "model.safetensors", tmp_path / "secret.safetensors")
    edit(hugging_face, "model.safetensors.index.json", weight_map={"lm_head.weight": file})
    with pytest.raises(HuggingFaceError, match="lacks 1 of 1 files"):
        open_model(str(hugging_face))
    with pytest.raises(HuggingFaceError, match="only safetensors in the folder itself"):
        FolderWeights(str(hugging_face), spec, tmp_path)


def test_a_chat_template_of_a_model_reaches_no_python(hugging_face: Path, planted: Path) -> None:
    """Rewards render with the template of the model's own tokenizer."""
    from jinja2 import TemplateError
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(hugging_face / "tokenizer.json"))
    reach = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(TemplateError, match="access to attribute '__class__'"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], chat_template=reach, tokenize=False)


def test_the_front_matter_of_a_model_card_makes_no_object(hugging_face: Path, planted: Path) -> None:
    (hugging_face / "README.md").write_text(
        f"---\nlicense: !!python/object/apply:os.system ['touch {planted}']\n---\n"
    )
    # the words, of which nobody makes a call
    assert open_model(str(hugging_face)).license == f"touch {planted}"
    assert not planted.exists()
