"""Shards of conversations."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apertus_model.chat.encoder import TRAINED
from apertus_model.data.conversations.stored import (
    SHARD_SUFFIXES,
    Conversation,
    ConversationFileError,
    ConversationShards,
)
from apertus_model.data.tokens.megatron import TokenFileWriter
from infra.store.documents import Manifest

HI = {"role": "user", "content": "Hi"}
YES = {"role": "assistant", "content": "Yes"}


class Folder:
    """Files that were written by hand, with the interface of an artifact."""

    def __init__(self, path: Path, shards: list[str]) -> None:
        self.path = path
        facts = {"vocab_size": 100, "train": shards, "validation": []}
        self.manifest = Manifest(attempt="a", files={}, metrics={}, facts=facts)

    def local(self, name: str) -> Path:
        return self.path / name


def test_shards_read_like_one_list(tmp_path: Path) -> None:
    written = [
        Conversation(f"{number}", [HI, YES], None, ["Yes"], f"g{number}", {"n": number})
        for number in range(5)
    ]
    tokens = [list(range(number, 2 * number + 3)) for number in range(5)]
    for shard, chosen in (("train-00000", [0, 1, 2]), ("train-00001", [3, 4])):
        with TokenFileWriter(tmp_path / shard, "<u2") as writer:
            for number in chosen:
                writer.write(tokens[number])
        (tmp_path / f"{shard}.jsonl").write_text(
            "".join(written[number].to_json() + "\n" for number in chosen)
        )
        np.save(
            tmp_path / f"{shard}.mask.npy",
            np.concatenate([np.arange(len(tokens[number])) % 3 for number in chosen]).astype("u1"),
        )
    shards: Any = ConversationShards(Folder(tmp_path, ["train-00000", "train-00001"]), "train")  # type: ignore[arg-type]
    for read in (shards, pickle.loads(pickle.dumps(shards))):
        assert len(read) == 5
        assert read.lengths.tolist() == [3, 4, 5, 6, 7]
        for number in (4, 0, 3, 2, 1):
            assert read.conversation(number) == written[number]
            assert read.tokens(number).tolist() == tokens[number]
            assert (read.mask(number) == TRAINED).tolist() == [
                place % 3 == 1 for place in range(len(tokens[number]))
            ]
        with pytest.raises(IndexError, match="conversation 5 of 5"):
            read.tokens(5)
    assert len(ConversationShards(Folder(tmp_path, []), "validation")) == 0  # type: ignore[arg-type]
    assert all((tmp_path / f"train-00000{suffix}").exists() for suffix in SHARD_SUFFIXES)
    (tmp_path / "train-00001.jsonl").write_text(written[3].to_json() + "\n")
    with pytest.raises(ConversationFileError, match="1 lines for 2 conversations"):
        ConversationShards(Folder(tmp_path, ["train-00001"]), "train").conversation(0)  # type: ignore[arg-type]
