"""Sources that are tokens already: taken as they are, and refused where they are not as stated."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer

from apertus_model.data.tokens.megatron import TokenFile, TokenFileError, TokenFileWriter
from infra.store import Artifact
from infra.store.inputs import SourceError
from specs.errors import StageError
from tests.apertus_model.data.sources import compare, corpus_of, files_of
from tests.machine import slow


def _digest(tokenizer: Artifact) -> str:
    return f"sha256:{hashlib.sha256(tokenizer.bytes('tokenizer.json')).hexdigest()}"


def _tokens(corpus: Artifact, folder: Path, cut: slice = slice(None), dtype: str = "<u2") -> list[list[int]]:
    """Writes the tokens of a corpus as two pairs of files, `cut` of each document; all of them."""
    found = []
    for split in ("train", "validation"):
        (shard,) = corpus.manifest.facts[split]
        file = TokenFile(corpus.local(f"{shard}.bin"), corpus.local(f"{shard}.idx"))
        with TokenFileWriter(folder / split, dtype) as writer:
            for number in range(len(file)):
                writer.write(np.asarray(file[number][cut]))
                found.append(file[number].tolist())
    return found


def test_tokens_are_taken_as_they_are_and_placed_as_their_text_would_be(
    bench: Any, tmp_path: Path, tokenizer: Artifact, expected: Artifact
) -> None:
    for markers, cut in (("both", slice(None)), ("end", slice(1, None)), ("none", slice(1, -1))):
        (tmp_path / markers).mkdir()
        _tokens(expected, tmp_path / markers, cut, dtype="<i4")
        spec = corpus_of(tmp_path / markers, "megatron", tokenizer=_digest(tokenizer)[:24], markers=markers)
        # One file per task: two of the four have an index only, whose pair is another task's.
        compare(
            bench,
            markers,
            {**spec, "files_per_task": 1},
            tokenizer,
            expected,
            workers=2 if markers == "both" else 1,
        )


def test_tokens_are_read_from_any_filesystem(
    bench: Any, tmp_path: Path, tokenizer: Artifact, expected: Artifact
) -> None:
    (tmp_path / "tokens").mkdir()
    _tokens(expected, tmp_path / "tokens")
    url = f"memory://{tmp_path.name}/tokens"
    memory, root = fsspec.core.url_to_fs(url)
    for path in (tmp_path / "tokens").iterdir():
        memory.pipe_file(f"{root}/{path.name}", path.read_bytes())
    corpus = bench.run(
        "corpus", "c", corpus_of(url, "megatron", tokenizer="trusted"), {"tokenizer": tokenizer}
    )
    assert files_of(corpus) == files_of(expected)
    assert corpus.manifest.spec["source"]["tokenizer"] == "trusted"


def test_the_limit_counts_documents_of_tokens_too(
    bench: Any, tmp_path: Path, tokenizer: Artifact, expected: Artifact
) -> None:
    (tmp_path / "tokens").mkdir()
    stored = _tokens(expected, tmp_path / "tokens")
    spec = corpus_of(tmp_path / "tokens", "megatron", tokenizer="trusted", limit=7) | {
        "process": {"holdout": 0.75, "pii": False}
    }
    corpus = bench.run("corpus", "c", spec, {"tokenizer": tokenizer})
    found = _tokens(corpus, tmp_path)
    assert sorted(found) == sorted(stored[:7])


def test_documents_without_tokens_or_with_a_marker_inside_are_counted(
    bench: Any, tmp_path: Path, tokenizer: Artifact
) -> None:
    (tmp_path / "tokens").mkdir()
    kept = [[1, *range(200, 210 + number), 2] for number in range(20)]
    with TokenFileWriter(tmp_path / "tokens" / "a", "<u2") as writer:
        for document in [*kept, [], [1, 2], [1, 300, 2, 1, 301, 2]]:
            writer.write(document)
    corpus = bench.run(
        "corpus",
        "c",
        corpus_of(tmp_path / "tokens", "megatron", tokenizer="trusted"),
        {"tokenizer": tokenizer},
    )
    assert corpus.manifest.metrics["rejected"] == {"empty": 2, "marker_inside": 1}
    assert sorted(_tokens(corpus, tmp_path)) == sorted(kept)


@pytest.mark.parametrize("workers", [1, slow(2)])
def test_tokens_of_another_tokenizer_are_refused(
    bench: Any, documents: Path, tokenizer: Artifact, workers: int
) -> None:
    spec = corpus_of(documents, "megatron", include=["*"], tokenizer=f"sha256:{'0' * 12}")
    with pytest.raises(
        StageError, match=rf"are of tokenizer sha256:0+, the corpus's is {_digest(tokenizer)}"
    ):
        bench.run("corpus", "c", spec, {"tokenizer": tokenizer}, workers=workers)


@pytest.mark.parametrize(
    ("document", "markers", "message"),
    [
        (
            [200, 201, 2],
            "both",
            (
                r"document 1 of '.*a\.bin' begins with token 200 and ends with 2; the begin- and .* are 1 and"
                r" 2, .*: both"
            ),
        ),
        ([1, 200, 201], "both", "begins with token 1 and ends with 201"),
        (
            [1, 200, 2],
            "end",
            "begins with token 1 and ends with 2; .* the source says that there are: end. Fix: markers",
        ),
    ],
)
def test_documents_that_do_not_begin_and_end_as_stated_are_an_error(
    bench: Any, tmp_path: Path, tokenizer: Artifact, document: list[int], markers: str, message: str
) -> None:
    (tmp_path / "tokens").mkdir()
    with TokenFileWriter(tmp_path / "tokens" / "a", "<u2") as writer:
        writer.write([1, 200, 2] if markers == "both" else [200, 2])
        writer.write(document)
    with pytest.raises(SourceError, match=message):
        bench.run(
            "corpus",
            "c",
            corpus_of(tmp_path / "tokens", "megatron", tokenizer="trusted", markers=markers),
            {"tokenizer": tokenizer},
        )


def test_ids_beyond_the_vocabulary_are_an_error_with_file_and_place(
    bench: Any, tmp_path: Path, tokenizer: Artifact
) -> None:
    (tmp_path / "tokens").mkdir()
    with TokenFileWriter(tmp_path / "tokens" / "a", "<u2") as writer:
        writer.write([1, 511, 2])
        writer.write([1, 512, 2])
    with pytest.raises(
        TokenFileError, match=r"a\.bin holds token id 512 between tokens 0 and 6; the vocabulary has 512"
    ):
        bench.run(
            "corpus",
            "c",
            corpus_of(tmp_path / "tokens", "megatron", tokenizer="trusted"),
            {"tokenizer": tokenizer},
        )


@pytest.mark.parametrize(
    ("name", "include", "message"),
    [
        ("a.idx", ["*"], r"no \.idx beside 'a\.bin'"),
        ("a.bin", ["*"], r"no \.bin beside 'a\.idx'"),
        ("b.bin", ["*.bin"], r"no \.idx beside 'a\.bin'"),
        ("b.bin", ["*", "../*.txt"], "'readme.txt' of .* is neither"),
    ],
)
def test_a_pair_of_which_one_file_is_missing_is_an_error(
    bench: Any, tmp_path: Path, tokenizer: Artifact, name: str, include: list[str], message: str
) -> None:
    folder = tmp_path / "tokens"
    folder.mkdir()
    with TokenFileWriter(folder / "a", "<u2") as writer:
        writer.write([1, 200, 2])
    (folder / name).unlink(missing_ok=True)
    if "readme" in message:
        (folder / "readme.txt").touch()
    with pytest.raises(SourceError, match=message):
        bench.run(
            "corpus",
            "c",
            corpus_of(folder, "megatron", include=include, tokenizer="trusted"),
            {"tokenizer": tokenizer},
        )


def test_a_damaged_index_ends_the_stage(bench: Any, tmp_path: Path, tokenizer: Artifact) -> None:
    folder = tmp_path / "tokens"
    folder.mkdir()
    with TokenFileWriter(folder / "a", "<u2") as writer:
        for _ in range(3):
            writer.write([1, 200, 2])
    content = bytearray((folder / "a.idx").read_bytes())
    content[34] += 1
    (folder / "a.idx").write_bytes(content)
    with pytest.raises(
        TokenFileError, match=r"a\.idx: sequence 1 begins at byte 6, the one before ends at 8"
    ):
        bench.run("corpus", "c", corpus_of(folder, "megatron", tokenizer="trusted"), {"tokenizer": tokenizer})


def test_a_document_of_a_million_tokens_is_one_document(
    bench: Any, tmp_path: Path, tokenizer: Artifact, texts: list[str]
) -> None:
    folder = tmp_path / "container"
    folder.mkdir()
    long = "\n".join(f"{number} {texts[number % 60]}" for number in range(6000))
    pyarrow.parquet.write_table(pyarrow.table({"text": [*texts, long]}), folder / "a.parquet")
    corpus = bench.run("corpus", "c", corpus_of(folder, "parquet"), {"tokenizer": tokenizer})
    found = max(_tokens(corpus, tmp_path), key=len)
    assert len(found) > 1_000_000
    assert Tokenizer.from_file(str(tokenizer.local("tokenizer.json"))).decode(found[1:-1]) == long
