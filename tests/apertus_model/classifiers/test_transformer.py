"""Embeddings and logits of texts equal those of transformers for one text at a time, whatever is read with
them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from apertus_model.classifiers.transformer import ClassifierError, Transformer
from tests.apertus_model.encoders import language_texts, write_encoder

TEXTS = [text for _, text in language_texts()[::7]] + ["short", "", "x" * 3000]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("models") / "encoder")


@pytest.fixture(scope="module")
def encoder(folder: Path) -> Transformer:
    return Transformer(folder, "encoder", "AutoModel", 100)


def test_embedding_is_the_mean_of_the_last_hidden_states(folder: Path, encoder: Transformer) -> None:
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    found = encoder.embeddings(TEXTS)
    for text, ours in zip(TEXTS, found, strict=True):
        if not text:
            continue
        with torch.no_grad():
            ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=100)
            theirs = model(**ids).last_hidden_state[0].mean(0).numpy()
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_no_bit_depends_on_the_texts_that_are_read_together(encoder: Transformer) -> None:
    together = encoder.embeddings(TEXTS)
    backwards = encoder.embeddings(TEXTS[::-1])[::-1]
    alone = np.concatenate([encoder.embeddings([text]) for text in TEXTS])
    assert np.array_equal(together, backwards) and np.array_equal(together, alone)


def test_a_folder_with_weights_as_a_pickle_is_refused(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "pickled"
    other.mkdir()
    for path in folder.iterdir():
        if path.suffix == ".json":
            (other / path.name).write_bytes(path.read_bytes())
    torch.save({"a": torch.zeros(1)}, other / "pytorch_model.bin")
    with pytest.raises(ClassifierError, match="encoder of the test cannot be opened"):
        Transformer(other, "encoder of the test", "AutoModel", 100)


def test_a_folder_without_tokenizer_or_padding_is_refused(folder: Path, tmp_path: Path) -> None:
    for name, without in (("none", ("tokenizer.json",)), ("unpadded", ())):
        other = tmp_path / name
        other.mkdir()
        for path in folder.iterdir():
            if path.name not in without:
                (other / path.name).write_bytes(path.read_bytes())
    with pytest.raises(ClassifierError, match="cannot be opened"):
        Transformer(tmp_path / "none", "encoder", "AutoModel", 100)
    stated = json.loads((tmp_path / "unpadded" / "tokenizer_config.json").read_text())
    stated.pop("pad_token", None)
    (tmp_path / "unpadded" / "tokenizer_config.json").write_text(json.dumps(stated))
    (tmp_path / "unpadded" / "special_tokens_map.json").unlink(missing_ok=True)
    with pytest.raises(ClassifierError, match="has no padding token"):
        Transformer(tmp_path / "unpadded", "encoder", "AutoModel", 100)


def test_more_tokens_than_the_model_has_positions_for_are_refused(folder: Path) -> None:
    with pytest.raises(ClassifierError, match="reads 130 tokens at most, and max_tokens is 131"):
        Transformer(folder, "encoder", "AutoModel", 131)


def test_code_of_a_folder_is_never_run(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "remote"
    other.mkdir()
    for path in folder.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    config = json.loads((other / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModel": "mine.Model"}}
    (other / "config.json").write_text(json.dumps(config))
    (other / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ClassifierError, match="cannot be opened"):
        Transformer(other, "encoder", "AutoModel", 100)
    assert not (tmp_path / "ran").exists()
