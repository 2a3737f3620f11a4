"""Frozen Hugging Face models from a folder: embeddings of texts, and logits of sequence classifiers.

Invariants:
- Only safetensors are opened; nothing is fetched from a hub, and no code of the folder is run.
- A forward pass has one of a few shapes (rows, tokens). The shape of a text follows from its own length, and
  rows that no text fills are copies, so a result does not depend on which texts are read together, provided
  that a kernel computes a row of a matrix in the same way wherever it is.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from apertus_model.pretrained import own_device, read_pretrained
from apertus_model.tokenizer_files import open_folder
from specs.errors import StageError

STEP = 64  # lengths of forward passes are multiples of this, or the largest length
TOKENS_PER_PASS = {"cpu": 1024, "cuda": 16_384}
Floats = NDArray[np.float32]


class ClassifierError(StageError):
    """A model or data from which no score can be computed. The message names it."""


class Transformer:
    def __init__(
        self,
        folder: Path,
        name: str,
        model: Literal["AutoModel", "AutoModelForSequenceClassification"],
        max_tokens: int,
        precision: str = "auto",
    ) -> None:
        """Opens a folder; `name` is for messages. ClassifierError for a folder that transformers cannot open,
        that has no padding token, or whose model reads fewer tokens than `max_tokens`."""
        import transformers

        try:
            self._tokenizer: Any = open_folder(folder)
            self._model: Any = read_pretrained(getattr(transformers, model), folder, precision)
        # transformers raises errors of many kinds for a folder that it cannot open
        except Exception as error:
            raise ClassifierError(f"{name} cannot be opened: {type(error).__name__}: {error}") from error
        pad = self._tokenizer.pad_token_id
        if pad is None:
            raise ClassifierError(
                f"the tokenizer of {name} has no padding token, so texts cannot be read together. Fix: set"
                " pad_token in its tokenizer_config.json"
            )
        self.config: Any = self._model.config
        self.config.pad_token_id = pad
        if max_tokens > (most := self._most_tokens()):
            raise ClassifierError(
                f"{name} reads {most} tokens at most, and max_tokens is {max_tokens}. Fix: set {most} or less"
            )
        self._device = torch.device(own_device())
        self._model.to(self._device)
        self._max_tokens, self._pad = max_tokens, int(pad)

    def embeddings(self, texts: Sequence[str]) -> Floats:
        """The last hidden states, averaged over the tokens of each text in float32, as (texts, width)."""

        def mean(output: Any, mask: torch.Tensor) -> torch.Tensor:
            weights = mask.unsqueeze(-1).float()
            return (output.last_hidden_state.float() * weights).sum(1) / weights.sum(1)

        return self._compute(texts, mean)

    def logits(self, texts: Sequence[str]) -> Floats:
        """The logits in float32, as (texts, labels)."""
        return self._compute(texts, lambda output, mask: output.logits.float())

    @torch.inference_mode()
    def _compute(self, texts: Sequence[str], reduce: Callable[[Any, torch.Tensor], torch.Tensor]) -> Floats:
        rows = [row or [self._pad] for row in self._tokens(texts)]
        by_length: dict[int, list[int]] = {}
        for index, row in enumerate(rows):
            by_length.setdefault(min(-(-len(row) // STEP) * STEP, self._max_tokens), []).append(index)
        computed: list[tuple[list[int], Floats]] = []
        for length in sorted(by_length):
            size = max(1, TOKENS_PER_PASS[self._device.type] // length)
            for start in range(0, len(by_length[length]), size):
                chosen = by_length[length][start : start + size]
                ids = np.full((size, length), self._pad, np.int64)
                mask = np.zeros((size, length), np.int64)
                for place in range(size):
                    row = rows[chosen[min(place, len(chosen) - 1)]]
                    ids[place, : len(row)], mask[place, : len(row)] = row, 1
                tokens, attention = (torch.from_numpy(array).to(self._device) for array in (ids, mask))
                output = self._model(input_ids=tokens, attention_mask=attention)
                computed.append((chosen, reduce(output, attention)[: len(chosen)].cpu().numpy()))
        result = np.empty((len(rows), computed[0][1].shape[1]), np.float32)
        for chosen, values in computed:
            result[chosen] = values
        return result

    def _tokens(self, texts: Sequence[str]) -> list[list[int]]:
        return self._tokenizer(
            list(texts), truncation=True, max_length=self._max_tokens, return_attention_mask=False
        )["input_ids"]

    def _most_tokens(self) -> int:
        """The most tokens that the model and its tokenizer say they read; both may state no limit."""
        limits = [int(min(self._tokenizer.model_max_length, 2**31))]
        if (positions := getattr(self.config, "max_position_embeddings", None)) is not None:
            # RoBERTa counts positions from the one after its padding index
            embeddings = getattr(self._model.base_model, "embeddings", None)
            padding = getattr(getattr(embeddings, "position_embeddings", None), "padding_idx", None)
            limits.append(int(positions) - (padding + 1 if padding is not None else 0))
        return min(limits)
