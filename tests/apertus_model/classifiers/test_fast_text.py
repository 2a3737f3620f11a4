"""fastText learns languages, in the same bits each time."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from apertus_model.classifiers.fast_text import FastTextModel, line, train
from apertus_model.classifiers.transformer import ClassifierError
from specs.stages.classifier import FastText
from tests.apertus_model.encoders import language_texts

SPEC = FastText(method="fasttext", dim=8, buckets=2000, epochs=20, lr=0.5)


def test_labels_in_a_text_and_ends_of_lines_are_left_out() -> None:
    assert line("one\n two\t__label__de three __label__") == "one two three"


def test_languages_are_learned_in_the_same_bits_each_time(tmp_path: Path) -> None:
    texts = language_texts()
    for name in ("one", "two"):
        train(texts[::2], SPEC, 7, tmp_path, tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]
    model = FastTextModel(tmp_path / "one", "one")
    labels = ["de", "fr", "ru"]
    assert sorted(model.labels) == labels
    found = model.probabilities([text for _, text in texts[1::2]], labels)
    np.testing.assert_allclose(found.sum(1), 1, atol=1e-3)
    right = [labels[row.argmax()] == label for row, (label, _) in zip(found, texts[1::2], strict=True)]
    assert np.mean(right) > 0.9
    assert found.max() <= 1


def test_training_that_diverges_is_an_error(tmp_path: Path) -> None:
    wild = SPEC.model_copy(update={"lr": 1e30})
    with pytest.raises(ClassifierError, match=r"fastText cannot train on these documents: .*NaN"):
        train(language_texts()[::20], wild, 7, tmp_path, tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"something else")
    with pytest.raises(ClassifierError, match=r"model\.bin is not a fastText model"):
        FastTextModel(tmp_path / "model.bin", "model.bin")


@pytest.mark.parametrize("kept", [0, 60, 100, 1000])
def test_a_model_that_is_cut_off_is_refused(tmp_path: Path, kept: int) -> None:
    """fastText itself reads the dictionary of such a file without end."""
    train(language_texts()[::2], SPEC, 7, tmp_path, tmp_path / "whole")
    content = (tmp_path / "whole").read_bytes()
    (tmp_path / "model.bin").write_bytes(content[:kept])
    with pytest.raises(ClassifierError, match=r"model\.bin is not a fastText model: "):
        FastTextModel(tmp_path / "model.bin", "model.bin")


def test_a_model_that_states_more_than_fits_into_memory_is_refused(tmp_path: Path) -> None:
    train(language_texts()[::2], SPEC, 7, tmp_path, tmp_path / "whole")
    content = bytearray((tmp_path / "whole").read_bytes())
    shape = FastTextModel(tmp_path / "whole", "whole")._model.get_input_matrix().shape
    place = content.index(struct.pack("<2q", *shape))
    content[place : place + 8] = struct.pack("<q", 2**45)
    (tmp_path / "model.bin").write_bytes(content)
    with pytest.raises(ClassifierError, match=r"model\.bin is not a fastText model: "):
        FastTextModel(tmp_path / "model.bin", "model.bin")
