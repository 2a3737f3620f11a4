"""The files of a corpus artifact, for those who train or evaluate on it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from apertus_model.data.megatron import token_dtype
from infra.store import Artifact

Split = Literal["train", "validation"]


def split_files(corpus: Artifact, split: Split) -> list[tuple[Path, Path]]:
    """Local `.bin` and `.idx` of each shard of a split, in order, content checked."""
    return [shard.files() for shard in split_shards(corpus, split)]


class CorpusShard:
    """A shard that is opened when it is first read: until then the manifest is all that is known of it.

    Attributes:
        tokens: how many it holds, by the size that the manifest states.
    """

    def __init__(self, corpus: Artifact, name: str) -> None:
        self.tokens = int(corpus.manifest["files"][f"{name}.bin"]["size"]) // token_dtype(corpus.manifest["facts"]["vocab_size"]).itemsize
        self._corpus = corpus
        self._name = name

    def files(self) -> tuple[Path, Path]:
        """Local `.bin` and `.idx`, content checked."""
        return self._corpus.local(f"{self._name}.bin"), self._corpus.local(f"{self._name}.idx")


def split_shards(corpus: Artifact, split: Split) -> list[CorpusShard]:
    """The shards of a split, in order, none of them opened. What `MixtureSamples.open` takes for one source."""
    return [CorpusShard(corpus, name) for name in corpus.manifest["facts"][split]]
