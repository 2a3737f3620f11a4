"""Hugging Face sequence classifiers from a local or remote folder, and reward models, which have one output.

Invariants: nothing is fetched from a hub and no code of the folder is run; a batch of a reward model holds
completions of one prompt only.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from apertus_model.files import copy_folder
from apertus_model.pretrained import own_device, read_pretrained
from apertus_model.rewards.base import RewardError, Scored, TooLongError, check_vocabulary, plain
from apertus_model.tokenizer_files import open_folder
from specs.rewards import CLASSIFIER_FILES

BATCH = 16


class SequenceClassifier:
    """A Hugging Face sequence classifier and its tokenizer, from a local folder."""

    def __init__(self, folder: Path, name: str) -> None:
        """Opens a folder; `name` is for messages. RewardError when transformers cannot open it."""
        import transformers

        try:
            self._tokenizer: Any = open_folder(folder, name=name)
            config = transformers.AutoConfig.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
            # transformers has no sequence classification for Apertus: see specs.hugging_face.architecture
            self._by_token = config.architectures == ["ApertusForTokenClassification"]
            kind = "Token" if self._by_token else "Sequence"
            self._model: Any = read_pretrained(
                getattr(transformers, f"AutoModelFor{kind}Classification"), folder
            )
        # transformers raises errors of many kinds for a folder that it cannot open
        except Exception as error:
            raise RewardError(f"the {name} cannot be opened: {type(error).__name__}: {error}") from error
        check_vocabulary(name, self._tokenizer, self._model)
        self._model.to(own_device())
        # Several rows in a batch need a padding token, which the model must know: it takes its logit at the
        # last token before the padding.
        self._batch = BATCH if self._tokenizer.pad_token_id is not None else 1
        if self._model.config.pad_token_id is None:
            self._model.config.pad_token_id = self._tokenizer.pad_token_id

    @torch.inference_mode()
    def logits(self, rows: Sequence[list[int]]) -> torch.Tensor:
        """The logits (rows, labels) in float32; consecutive rows are computed together."""
        of_batches = []
        for begin in range(0, len(rows), self._batch):
            batch = self._tokenizer.pad(
                {"input_ids": rows[begin : begin + self._batch]},
                padding_side="right" if self._by_token else None,
                return_tensors="pt",
            ).to(self._model.device)
            output = self._model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
            logits = output.logits
            if self._by_token:
                last = batch["attention_mask"].sum(dim=1) - 1
                logits = logits[torch.arange(len(last), device=last.device), last]
            of_batches.append(logits.float().cpu())
        return torch.cat(of_batches)


class Classifier(SequenceClassifier):
    """A reward: the classifier's logit for the conversation of prompt and completion, rendered by the chat
    template of its tokenizer; without a template, as the turns' texts separated by empty lines."""

    def __init__(self, folder: Path, name: str, max_tokens: int) -> None:
        super().__init__(folder, f"reward model {name}")
        if self._model.config.num_labels != 1:
            raise RewardError(
                f"the reward model {name} has {self._model.config.num_labels} outputs; a reward needs"
                " exactly one"
            )
        self._max_tokens = max_tokens

    @classmethod
    def open(cls, url: str, scratch: Path, max_tokens: int) -> Classifier:
        """Copies the folder to `scratch` and loads it. RewardError for a folder that is no reward model."""
        return cls(copy_folder(url, scratch / "reward-model", CLASSIFIER_FILES), url, max_tokens)

    def tokens(self, item: Scored) -> list[int]:
        """The input of the model. TooLongError for more than `max_tokens`."""
        turns = [{"role": message["role"], "content": plain(message["content"])} for message in item.messages]
        turns.append({"role": "assistant", "content": item.completion})
        if self._tokenizer.chat_template:
            text = self._tokenizer.apply_chat_template(turns, tokenize=False)
            tokens: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            tokens = self._tokenizer("\n\n".join(turn["content"] for turn in turns))["input_ids"]
        if len(tokens) > self._max_tokens:
            raise TooLongError(
                f"the reward model would read {len(tokens)} tokens, more than max_tokens {self._max_tokens}"
                " of the reward. Fix: raise it, as far as the model allows, or lower max_tokens of the stage"
            )
        return tokens

    def score(self, items: Sequence[Scored]) -> list[float]:
        return self.logits([self.tokens(item) for item in items])[:, 0].tolist()
