"""A local classifier of answers, such as of toxicity: the probability of a label by a sequence classifier.

Invariant: a probability depends on the set of texts that are read together, and not on their order: batches
are made by length.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from apertus_model.files import copy_folder
from apertus_model.rewards.base import RewardError
from apertus_model.rewards.classifier import SequenceClassifier
from specs.rewards import CLASSIFIER_FILES
from specs.stages.harness import ClassifierSpec


class AnswerClassifier(SequenceClassifier):
    """Probabilities of the label `label` for texts."""

    def __init__(self, folder: Path, spec: ClassifierSpec) -> None:
        """RewardError for a folder that transformers cannot open, or a classifier without the label."""
        super().__init__(folder, f"classifier {spec.model}")
        config = self._model.config
        labels = {str(name): int(index) for index, name in config.id2label.items()}
        if spec.label not in labels:
            raise RewardError(
                f"the classifier {spec.model} has no label {spec.label!r}. Fix: use one of"
                f" {', '.join(labels)}"
            )
        self.label = spec.label
        self._index = labels[spec.label]
        self._independent = config.problem_type == "multi_label_classification" or config.num_labels == 1
        self._most = spec.max_tokens
        self._known: dict[str, float] = {}

    @classmethod
    def open(cls, spec: ClassifierSpec, scratch: Path) -> AnswerClassifier:
        """Copies the folder to `scratch` and loads it."""
        return cls(copy_folder(spec.model, scratch / "classifier", CLASSIFIER_FILES), spec)

    def has(self, texts: Iterable[str]) -> bool:
        """Whether all these texts were read."""
        return all(text in self._known for text in texts)

    def read(self, texts: Iterable[str]) -> None:
        """Computes the probabilities of texts, in float32."""
        tokens = {text: self._tokens(text) for text in set(texts) - self._known.keys()}
        if not tokens:
            return
        new = sorted(tokens, key=lambda text: (len(tokens[text]), text))
        logits = self.logits([tokens[text] for text in new])
        probabilities = torch.sigmoid(logits) if self._independent else torch.softmax(logits, dim=-1)
        self._known |= dict(zip(new, probabilities[:, self._index].tolist(), strict=True))

    def probability(self, text: str) -> float:
        """The probability of a text that was read."""
        return self._known[text]

    def _tokens(self, text: str) -> list[int]:
        """The tokens at the start of a text; a padding token for an empty text."""
        tokens: list[int] = self._tokenizer(text, truncation=True, max_length=self._most)["input_ids"]
        return tokens or [self._model.config.pad_token_id or 0]
