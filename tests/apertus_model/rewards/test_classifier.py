from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from apertus_model.data.tokens.vocabulary import config_files, train
from apertus_model.rewards import RewardError, Scored, open_reward
from apertus_model.rewards.classifier import Classifier
from specs.rewards import RewardSpec

TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}</s>{% endfor %}"
MESSAGES = [
    {"role": "user", "content": "What is it?"},
    {"role": "assistant", "content": [{"type": "response", "text": "A file."}]},
]
TEXTS = ["short", "a rather longer answer to the question", "", "and a third one", "short"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_classifier(tmp_path / "reward", labels=1, template=TEMPLATE)


def write_classifier(folder: Path, *, labels: int, template: str | None) -> Path:
    """A tiny random sequence classifier with a tokenizer."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    LlamaForSequenceClassification(
        LlamaConfig(vocab_size=512, num_labels=labels, pad_token_id=10, **sizes)
    ).save_pretrained(folder)
    train(["a few words to learn from"], 512, 128).save(str(folder / "tokenizer.json"))
    for name, document in config_files().items():
        (folder / name).write_text(json.dumps(document))
    if template:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def _directly(folder: Path, text: str, *, special: bool) -> float:
    """The logit of one text, without batch or padding."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        return float(model(**tokenizer(text, return_tensors="pt", add_special_tokens=special)).logits[0, 0])


def test_the_value_is_the_logit_of_the_rendered_conversation(folder: Path, tmp_path: Path) -> None:
    reward = open_reward(RewardSpec(model=str(folder)), tmp_path / "scratch")
    values = reward.score([Scored(MESSAGES, text) for text in TEXTS])
    rendered = [f"[user] What is it?</s>[assistant] A file.</s>[assistant] {text}</s>" for text in TEXTS]
    assert values == pytest.approx([_directly(folder, text, special=False) for text in rendered], abs=1e-5)
    assert len({round(value, 4) for value in values}) == 4


def test_without_a_template_the_texts_are_joined(tmp_path: Path) -> None:
    folder = write_classifier(tmp_path / "reward", labels=1, template=None)
    values = open_reward(RewardSpec(model=str(folder)), tmp_path / "scratch").score([Scored(MESSAGES, "yes")])
    assert values == pytest.approx(
        [_directly(folder, "What is it?\n\nA file.\n\nyes", special=True)], abs=1e-5
    )


def test_a_conversation_that_is_too_long_for_the_model_is_an_error(folder: Path, tmp_path: Path) -> None:
    reward = open_reward(RewardSpec(model=str(folder), max_tokens=30), tmp_path / "scratch")
    with pytest.raises(RewardError, match="more than max_tokens 30"):
        reward.score([Scored(MESSAGES, "word " * 40)])


def test_a_model_of_several_outputs_is_refused(tmp_path: Path) -> None:
    folder = write_classifier(tmp_path / "reward", labels=3, template=TEMPLATE)
    with pytest.raises(RewardError, match="has 3 outputs"):
        open_reward(RewardSpec(model=str(folder)), tmp_path / "scratch")


def test_weights_that_are_no_safetensors_are_not_read(folder: Path, tmp_path: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(RewardError, match="cannot be opened"):
        Classifier(folder, "theirs", max_tokens=100)
    with pytest.raises(RewardError, match="cannot be opened"):
        open_reward(RewardSpec(model=str(folder)), tmp_path / "scratch")


def test_a_tokenizer_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([f"new{index}" for index in range(512)])
    tokenizer.save(str(folder / "tokenizer.json"))
    with pytest.raises(
        RewardError, match=r"the tokenizer of the reward model .* has .* the model embeds 512"
    ):
        open_reward(RewardSpec(model=str(folder)), tmp_path / "scratch")
