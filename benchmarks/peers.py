"""The loaders of others, opened the way their users do.

Megatron-core is installed by those who want to compare (see `benchmarks.data_loader`); torchtitan is there.
"""

from __future__ import annotations

import functools
import json
import logging
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import default_collate

from apertus_model.data.tokens.goldfish import TABLE_SEED, TABLE_SIZE


class NoMegatron(Exception):
    """Megatron-core cannot be imported."""


class MegatronTokenizer:
    """What Megatron's datasets ask of a tokenizer."""

    def __init__(self, vocab_size: int, eod: int) -> None:
        self.vocab_size, self.eod, self.pad = vocab_size, eod, vocab_size - 1
        self.unique_identifiers = {"class": "benchmark", "vocab_size": vocab_size}


class MegatronLoader:
    """Megatron-core's GPTDataset, its sequences stacked as its DataLoader does.

    Args:
        prefix: of the `.bin` and `.idx`. cache: folder for the three indices that it builds: at the first
        opening, then they are read. restart: positions restart and no loss is taken at the ends of documents,
        as Apertus trained; without, masks and positions are made
            once and reused.
        samples: how many the indices are built for; one epoch by default.
    """

    def __init__(
        self,
        prefix: Path,
        cache: Path,
        *,
        sequence_length: int,
        vocab_size: int,
        eod: int,
        restart: bool,
        samples: int | None = None,
    ) -> None:
        warnings.filterwarnings("ignore")
        logging.getLogger("megatron").setLevel(logging.ERROR)
        try:
            import numpy as np
            from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
            from megatron.core.datasets.indexed_dataset import IndexedDataset
            from megatron.core.datasets.utils import Split
        except ImportError as error:
            raise NoMegatron(str(error)) from error
        config = GPTDatasetConfig(
            random_seed=28,
            sequence_length=sequence_length,
            blend=([str(prefix)], None),
            split="1",
            path_to_cache=str(cache),
            tokenizer=MegatronTokenizer(vocab_size, eod),
            reset_position_ids=restart,
            reset_attention_mask=False,
            eod_mask_loss=restart,
            create_attention_mask=False,
        )
        indexed = IndexedDataset(str(prefix), mmap=True)
        self._data = GPTDataset(
            indexed, str(prefix), np.arange(len(indexed), dtype=np.int32), samples, Split.train, config
        )

    def batch(self, first: int, size: int) -> dict[str, torch.Tensor]:
        """Samples first to first + size - 1, from the start again after the last one."""
        return default_collate([self._data[(first + i) % len(self._data)] for i in range(size)])


@functools.cache
def _uniform() -> torch.Tensor:
    return torch.rand(TABLE_SIZE, generator=torch.Generator().manual_seed(TABLE_SEED))


def published_goldfish(labels: torch.Tensor, k: int, h: int) -> torch.Tensor:
    """Where the loss leaves labels (batch, seq_len) out, as arXiv 2406.10209 computes it: the product of
    each window, hashed by a table."""
    mask = torch.zeros_like(labels, dtype=torch.bool)
    mask[:, h - 1 :] = _uniform()[labels.unfold(1, h, 1).prod(dim=-1) % TABLE_SIZE] < 1 / k
    return mask


def torchtitan_batches(
    text: Path, tokenizer: Path, cache: Path, *, sequence_length: int, batch_size: int
) -> Iterator[Any]:
    """Batches of torchtitan's loader of text, which tokenises as it goes, without workers of its own.

    Args:
        text: JSONL with `text`.
        tokenizer: folder with tokenizer.json and tokenizer_config.json.
        cache: folder for what `datasets` makes of the JSONL.
    """
    from datasets import disable_progress_bars, load_dataset
    from torchtitan.components.tokenizer import HuggingFaceTokenizer
    from torchtitan.hf_datasets import DatasetConfig, text_datasets

    disable_progress_bars()
    logging.getLogger().setLevel(logging.ERROR)
    load = partial(load_dataset, "json", split="train", cache_dir=str(cache))
    text_datasets.DATASETS["benchmark"] = DatasetConfig(
        path=str(text), loader=lambda path: load(data_files=path), sample_processor=lambda row: row["text"]
    )
    loader = text_datasets.HuggingFaceTextDataLoader(
        text_datasets.HuggingFaceTextDataLoader.Config(dataset="benchmark"),
        dp_world_size=1,
        dp_rank=0,
        tokenizer=HuggingFaceTokenizer(tokenizer_path=str(tokenizer)),
        seq_len=sequence_length,
        local_batch_size=batch_size,
    )
    return iter(loader)


def train_tokenizer(text: Path, folder: Path, vocab_size: int) -> Any:
    """A byte-level BPE of the first 2,000 documents, in the form that torchtitan reads; the
    `tokenizers.Tokenizer`."""
    from tokenizers import ByteLevelBPETokenizer

    with open(text, encoding="utf-8") as file:
        documents = [json.loads(line)["text"] for _, line in zip(range(2000), file, strict=False)]
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        documents, vocab_size, show_progress=False, special_tokens=["<unk>", "<s>", "</s>"]
    )
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return tokenizer
