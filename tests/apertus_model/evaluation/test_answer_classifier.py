from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from apertus_model.evaluation.answer_classifier import AnswerClassifier
from apertus_model.rewards import RewardError
from specs.stages.harness import ClassifierSpec
from tests.apertus_model.rewards.test_classifier import write_classifier

TEXTS = ["a text", "a rather longer text of several words", "", "another one", "a text"]


def logits(folder: Path, text: str) -> torch.Tensor:
    """Of one text, without batch or padding."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        found: torch.Tensor = model(**tokenizer(text, return_tensors="pt")).logits[0]
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_classifier(tmp_path / "classifier", labels=3, template=None)


def set_problem(folder: Path, problem: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"problem_type": problem}))


def read(folder: Path, texts: list[str], label: str = "LABEL_2", max_tokens: int = 512) -> dict[str, float]:
    classifier = AnswerClassifier(
        folder, ClassifierSpec(model=str(folder), label=label, max_tokens=max_tokens)
    )
    assert not classifier.has(texts)
    classifier.read(texts)
    assert classifier.has(texts)
    return {text: classifier.probability(text) for text in texts}


def test_labels_exclude_each_other(folder: Path) -> None:
    found = read(folder, TEXTS)
    for text in filter(None, TEXTS):
        assert found[text] == pytest.approx(float(logits(folder, text).softmax(-1)[2]), abs=1e-6)


def test_labels_of_several_kinds_are_independent(folder: Path) -> None:
    set_problem(folder, "multi_label_classification")
    found = read(folder, TEXTS, "LABEL_1")
    for text in filter(None, TEXTS):
        assert found[text] == pytest.approx(float(logits(folder, text).sigmoid()[1]), abs=1e-6)


def test_a_single_output_is_a_probability(tmp_path: Path) -> None:
    folder = write_classifier(tmp_path / "classifier", labels=1, template=None)
    found = read(folder, ["a text"], "LABEL_0")
    assert found["a text"] == pytest.approx(float(logits(folder, "a text").sigmoid()[0]), abs=1e-6)


def test_probabilities_do_not_depend_on_the_order_of_texts(folder: Path) -> None:
    many = [f"text {index} " * (index % 7 + 1) for index in range(40)]
    assert read(folder, many) == read(folder, many[::-1])


def test_the_start_of_a_long_text_is_read(folder: Path) -> None:
    long = "a text of words " * 100
    short = read(folder, [long], max_tokens=20)[long]
    assert short != read(folder, [long])[long]
    assert short == read(folder, [long + "and more"], max_tokens=20)[long + "and more"]


def test_a_label_that_the_classifier_has_not_is_refused(folder: Path) -> None:
    message = "no label 'toxic'. Fix: use one of LABEL_0, LABEL_1, LABEL_2"
    with pytest.raises(RewardError, match=message):
        read(folder, TEXTS, "toxic")


def test_a_folder_without_a_classifier_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RewardError, match=r"the classifier .* cannot be opened"):
        AnswerClassifier.open(ClassifierSpec(model=str(tmp_path), label="toxic"), tmp_path / "scratch")
