"""The same documents through the corpus stage in every container."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import fsspec
import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
import zstandard
from tokenizers import Tokenizer

from apertus_model.data.megatron import TokenFile, TokenFileError, TokenFileWriter
from apertus_model.data.stream import split_files
from infra.store import Artifact
from infra.store.inputs import SourceError

Write = Callable[[Path, list[str]], None]


def _jsonl(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def _parquet(folder: Path, texts: list[str]) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / "a.parquet", row_group_size=17)


def _stream(folder: Path, texts: list[str]) -> None:
    with pyarrow.ipc.new_stream(str(folder / "a.arrow"), pyarrow.schema({"text": pyarrow.large_string()})) as writer:
        writer.write_table(pyarrow.table({"text": pyarrow.array(texts, pyarrow.large_string())}), max_chunksize=17)


def _saved(folder: Path, texts: list[str]) -> None:
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(str(folder), num_shards=3)


def _warc(folder: Path, texts: list[str]) -> None:
    pytest.importorskip("magic", exc_type=ImportError, reason="no libmagic: apt-get install libmagic1")
    writer = pytest.importorskip("warcio.warcwriter")
    buffer = io.BytesIO()
    archive = writer.WARCWriter(buffer, gzip=True)
    kind = {"WARC-Identified-Payload-Type": "text/plain"}
    for number, text in enumerate(texts):
        payload = io.BytesIO(text.encode())
        archive.write_record(
            archive.create_warc_record(f"https://a.example/{number}", "conversion", payload=payload, warc_headers_dict=kind)
        )
    (folder / "a.warc.wet.gz").write_bytes(buffer.getvalue())


CONTAINERS: list[tuple[str, Write]] = [
    ("jsonl", lambda folder, texts: (folder / "a.jsonl").write_bytes(_jsonl(texts)) and None),
    ("jsonl", lambda folder, texts: (folder / "a.jsonl.gz").write_bytes(gzip.compress(_jsonl(texts))) and None),
    ("jsonl", lambda folder, texts: (folder / "a.jsonl.zst").write_bytes(zstandard.compress(_jsonl(texts))) and None),
    ("parquet", _parquet),
    ("arrow", _stream),
    ("arrow", _saved),
]


def _spec(url: object, kind: str, **source: Any) -> dict[str, Any]:
    return {
        "source": {"url": str(url), "format": kind, **source},
        "process": {"holdout": 0.2, "pii": False},
        "seed": 28,
        "files_per_task": 2,
    }


def _bytes(corpus: Artifact) -> dict[str, bytes]:
    return {name: corpus.bytes(name) for name in sorted(corpus.manifest.files)}


@pytest.fixture
def expected(bench: Any, documents: Path, tokenizer: Artifact) -> Artifact:
    """The corpus of the sixty text files."""
    return bench.run("corpus", "expected", _spec(documents, "text"), {"tokenizer": tokenizer})


def _digest(tokenizer: Artifact) -> str:
    return f"sha256:{hashlib.sha256(tokenizer.bytes('tokenizer.json')).hexdigest()}"


def _tokens(corpus: Artifact, folder: Path, cut: slice = slice(None), dtype: str = "<u2") -> list[list[int]]:
    """Writes the tokens of a corpus as two pairs of files, `cut` of each document; all of them."""
    found = []
    for split in ("train", "validation"):
        (paths,) = split_files(corpus, split)  # type: ignore[arg-type]
        file = TokenFile(*paths)
        with TokenFileWriter(folder / split, dtype) as writer:
            for number in range(len(file)):
                writer.write(np.asarray(file[number][cut]))
                found.append(file[number].tolist())
    return found


def _check(bench: Any, name: str, spec: dict[str, Any], tokenizer: Artifact, expected: Artifact, workers: int = 1) -> None:
    corpus = bench.run("corpus", name, spec, {"tokenizer": tokenizer}, workers=workers)
    assert _bytes(corpus) == _bytes(expected), name
    assert corpus.manifest.metrics["read"] == expected.manifest.metrics["read"], name


def test_the_container_of_the_documents_does_not_change_the_corpus(
    bench: Any, tmp_path: Path, tokenizer: Artifact, texts: list[str], expected: Artifact
) -> None:
    for number, (kind, write) in enumerate(CONTAINERS):
        folder = tmp_path / f"{kind}-{number}"
        folder.mkdir()
        write(folder, texts)
        _check(bench, folder.name, _spec(folder, kind), tokenizer, expected)


def test_text_in_a_web_archive_gives_the_same_corpus(
    bench: Any, tmp_path: Path, tokenizer: Artifact, texts: list[str], expected: Artifact
) -> None:
    (tmp_path / "archive").mkdir()
    _warc(tmp_path / "archive", texts)
    _check(bench, "archive", _spec(tmp_path / "archive", "warc"), tokenizer, expected)


def test_tokens_are_taken_as_they_are_and_placed_as_their_text_would_be(
    bench: Any, tmp_path: Path, tokenizer: Artifact, expected: Artifact
) -> None:
    for markers, cut in (("both", slice(None)), ("end", slice(1, None)), ("none", slice(1, -1))):
        (tmp_path / markers).mkdir()
        _tokens(expected, tmp_path / markers, cut, dtype="<i4")
        spec = _spec(tmp_path / markers, "megatron", tokenizer=_digest(tokenizer)[:24], markers=markers)
        # One file per task: two of the four have an index only, whose pair is another task's.
        _check(bench, markers, {**spec, "files_per_task": 1}, tokenizer, expected, workers=2 if markers == "both" else 1)


def test_tokens_are_read_from_any_filesystem(bench: Any, tmp_path: Path, tokenizer: Artifact, expected: Artifact) -> None:
    (tmp_path / "tokens").mkdir()
    _tokens(expected, tmp_path / "tokens")
    url = f"memory://{tmp_path.name}/tokens"
    memory, root = fsspec.core.url_to_fs(url)
    for path in (tmp_path / "tokens").iterdir():
        memory.pipe_file(f"{root}/{path.name}", path.read_bytes())
    corpus = bench.run("corpus", "c", _spec(url, "megatron", tokenizer="trusted"), {"tokenizer": tokenizer})
    assert _bytes(corpus) == _bytes(expected)
    assert corpus.manifest.spec["source"]["tokenizer"] == "trusted"


def test_the_limit_counts_documents_of_tokens_too(bench: Any, tmp_path: Path, tokenizer: Artifact, expected: Artifact) -> None:
    (tmp_path / "tokens").mkdir()
    stored = _tokens(expected, tmp_path / "tokens")
    spec = _spec(tmp_path / "tokens", "megatron", tokenizer="trusted", limit=7) | {"process": {"holdout": 0.5, "pii": False}}
    corpus = bench.run("corpus", "c", spec, {"tokenizer": tokenizer})
    found = _tokens(corpus, tmp_path)
    assert sorted(found) == sorted(stored[:7])


def test_documents_without_tokens_or_with_a_marker_inside_are_counted(bench: Any, tmp_path: Path, tokenizer: Artifact) -> None:
    (tmp_path / "tokens").mkdir()
    kept = [[1, *range(200, 210 + number), 2] for number in range(20)]
    with TokenFileWriter(tmp_path / "tokens" / "a", "<u2") as writer:
        for document in [*kept, [], [1, 2], [1, 300, 2, 1, 301, 2]]:
            writer.write(document)
    corpus = bench.run("corpus", "c", _spec(tmp_path / "tokens", "megatron", tokenizer="trusted"), {"tokenizer": tokenizer})
    assert corpus.manifest.metrics["rejected"] == {"empty": 2, "marker_inside": 1}
    assert sorted(_tokens(corpus, tmp_path)) == sorted(kept)


@pytest.mark.parametrize("workers", [1, 2])
def test_tokens_of_another_tokenizer_are_refused(bench: Any, documents: Path, tokenizer: Artifact, workers: int) -> None:
    spec = _spec(documents, "megatron", include=["*"], tokenizer=f"sha256:{'0' * 12}")
    with pytest.raises(SourceError, match=rf"are of tokenizer sha256:0+, the corpus's is {_digest(tokenizer)}"):
        bench.run("corpus", "c", spec, {"tokenizer": tokenizer}, workers=workers)


@pytest.mark.parametrize(
    ("document", "markers", "message"),
    [
        ([200, 201, 2], "both", r"document 1 of '.*a\.bin' begins with token 200 and ends with 2; the begin- and .* are 1 and 2, .*: both"),
        ([1, 200, 201], "both", "begins with token 1 and ends with 201"),
        ([1, 200, 2], "end", "begins with token 1 and ends with 2; .* the source says that there are: end. Fix: markers"),
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
        bench.run("corpus", "c", _spec(tmp_path / "tokens", "megatron", tokenizer="trusted", markers=markers), {"tokenizer": tokenizer})


def test_ids_beyond_the_vocabulary_are_an_error_with_file_and_place(bench: Any, tmp_path: Path, tokenizer: Artifact) -> None:
    (tmp_path / "tokens").mkdir()
    with TokenFileWriter(tmp_path / "tokens" / "a", "<u2") as writer:
        writer.write([1, 511, 2])
        writer.write([1, 512, 2])
    with pytest.raises(TokenFileError, match=r"a\.bin holds token id 512 between tokens 0 and 6; the vocabulary has 512"):
        bench.run("corpus", "c", _spec(tmp_path / "tokens", "megatron", tokenizer="trusted"), {"tokenizer": tokenizer})


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
        bench.run("corpus", "c", _spec(folder, "megatron", include=include, tokenizer="trusted"), {"tokenizer": tokenizer})


def test_a_damaged_index_ends_the_stage(bench: Any, tmp_path: Path, tokenizer: Artifact) -> None:
    folder = tmp_path / "tokens"
    folder.mkdir()
    with TokenFileWriter(folder / "a", "<u2") as writer:
        for _ in range(3):
            writer.write([1, 200, 2])
    content = bytearray((folder / "a.idx").read_bytes())
    content[34] += 1
    (folder / "a.idx").write_bytes(content)
    with pytest.raises(TokenFileError, match=r"a\.idx: sequence 1 begins at byte 6, the one before ends at 8"):
        bench.run("corpus", "c", _spec(folder, "megatron", tokenizer="trusted"), {"tokenizer": tokenizer})


@pytest.mark.parametrize("workers", [1, 2])
def test_a_file_that_is_cut_off_ends_the_stage_with_its_name(
    bench: Any, tmp_path: Path, tokenizer: Artifact, texts: list[str], workers: int
) -> None:
    folder = tmp_path / "container"
    folder.mkdir()
    for name in ("a", "b", "c", "d"):
        (folder / f"{name}.jsonl.zst").write_bytes(zstandard.compress(_jsonl(texts))[: -8 if name == "c" else None])
    with pytest.raises(SourceError, match=r"cannot read '.*c\.jsonl\.zst' after document \d+, at about byte \d+: OSError"):
        bench.run("corpus", "c", _spec(folder, "jsonl"), {"tokenizer": tokenizer}, workers=workers)
    assert not Artifact(bench.store, "corpus/c").complete


@pytest.mark.parametrize("compressed", [True, False])
def test_an_archive_that_is_cut_off_in_a_record_ends_the_stage_with_its_name(
    bench: Any, tmp_path: Path, tokenizer: Artifact, texts: list[str], compressed: bool
) -> None:
    folder = tmp_path / "container"
    folder.mkdir()
    _warc(folder, texts)
    path = folder / "a.warc.wet.gz"
    content = path.read_bytes()
    if not compressed:
        content = gzip.decompress(content)
        path = path.rename(folder / "a.warc.wet")
    path.write_bytes(content[:-100])  # in the last record
    with pytest.raises(SourceError, match=rf"cannot read '.*{path.name}' after document \d+, at about byte \d+: EOFError"):
        bench.run("corpus", "c", _spec(folder, "warc"), {"tokenizer": tokenizer})
    assert not Artifact(bench.store, "corpus/c").complete


def test_rejections_of_rows_are_counted_in_the_manifest(bench: Any, tmp_path: Path, tokenizer: Artifact, texts: list[str]) -> None:
    folder = tmp_path / "container"
    folder.mkdir()
    column = pyarrow.array([*(text.encode() for text in texts), b"\xff", b"", None]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), folder / "a.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), folder / "b.parquet")
    corpus = bench.run("corpus", "c", _spec(folder, "parquet"), {"tokenizer": tokenizer})
    assert corpus.manifest.metrics["rejected"] == {"not_utf8": 1, "empty": 2, "empty_file": 1}
    assert corpus.manifest.metrics["read"]["documents"] == 60


def test_a_document_of_a_million_tokens_is_one_document(bench: Any, tmp_path: Path, tokenizer: Artifact, texts: list[str]) -> None:
    folder = tmp_path / "container"
    folder.mkdir()
    long = "\n".join(f"{number} {texts[number % 60]}" for number in range(6000))
    pyarrow.parquet.write_table(pyarrow.table({"text": [*texts, long]}), folder / "a.parquet")
    corpus = bench.run("corpus", "c", _spec(folder, "parquet"), {"tokenizer": tokenizer})
    found = max(_tokens(corpus, tmp_path), key=len)
    assert len(found) > 1_000_000
    assert Tokenizer.from_file(str(tokenizer.local("tokenizer.json"))).decode(found[1:-1]) == long


def test_a_tokenizer_is_trained_on_any_container(
    bench: Any, documents: Path, tmp_path: Path, texts: list[str], tokenizer: Artifact
) -> None:
    (tmp_path / "container").mkdir()
    _parquet(tmp_path / "container", texts)
    source = {"url": str(tmp_path / "container"), "format": "parquet"}
    same = bench.run("tokenizer", "same", {"sources": [source], "vocab_size": 512, "bytes_per_source": 100_000})
    assert same.bytes("tokenizer.json") == tokenizer.bytes("tokenizer.json")
