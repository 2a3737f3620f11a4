"""The files of a corpus artifact, for those who train or evaluate on it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from infra.store import Artifact

Split = Literal["train", "validation"]


def split_files(corpus: Artifact, split: Split) -> list[tuple[Path, Path]]:
    """Local `.bin` and `.idx` of each shard of a split, in order, content checked. What `MixtureSamples.open` takes for one source."""
    shards = corpus.manifest["facts"][split]
    return [(corpus.local(f"{shard}.bin"), corpus.local(f"{shard}.idx")) for shard in shards]
