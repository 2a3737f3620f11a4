"""Best-fit packing of a corpus, as a stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apertus_model.data.tokens.megatron import TokenFileError, TokenFileWriter
from infra.store import Artifact, Attempt

SHARDS = [[3, 9, 4], [16, 20]]


def _corpus(bench: Any, folder: Path, lost: int = 0) -> Artifact:
    """Shards of documents of these sizes; the last `.bin` lacks `lost` bytes."""
    attempt = Attempt(bench.job("corpus", "c"))
    names = [f"train-{number:05d}" for number in range(len(SHARDS))]
    for name, sizes in zip(names, SHARDS, strict=True):
        with TokenFileWriter(folder / name, "<u2") as writer:
            for size in sizes:
                writer.write(np.arange(size))
    data = folder / f"{names[-1]}.bin"
    data.write_bytes(data.read_bytes()[: 2 * sum(SHARDS[-1]) - lost])
    for name in names:
        for suffix in (".bin", ".idx"):
            attempt.put(folder / f"{name}{suffix}", f"{name}{suffix}")
    attempt.commit(metrics={}, facts={"vocab_size": 512, "train": names})
    return attempt.artifact


def test_packing_copies_the_indexes_of_a_remote_store_and_no_tokens(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APERTUS_CACHE", str(tmp_path / "cache"))
    remote = type(bench)(tmp_path / "remote", url=f"memory://{tmp_path.name}")
    corpora = [_corpus(place, tmp_path) for place in (remote, bench)]
    packed = [
        place.run("packing", "p", {"sequence_length": 16}, {"corpus": corpus})
        for place, corpus in zip((remote, bench), corpora, strict=True)
    ]
    copied = sorted(path.name for path in (tmp_path / "cache").rglob("*") if path.is_file())
    assert copied == ["train-00000.idx", "train-00001.idx"]
    assert packed[0].manifest.metrics == packed[1].manifest.metrics
    assert (packed[0].manifest.metrics["documents"], packed[0].manifest.metrics["tokens"]) == (5, 52)


def test_an_index_that_does_not_fit_its_tokens_is_refused(bench: Any, tmp_path: Path) -> None:
    corpus = _corpus(bench, tmp_path, lost=2)
    with pytest.raises(TokenFileError, match=r"train-00001\.bin has 70 bytes; .* end at byte 72"):
        bench.run("packing", "p", {"sequence_length": 16}, {"corpus": corpus})
