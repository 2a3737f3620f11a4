"""The same documents through the corpus stage in every container."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
import zstandard

from infra.store import Artifact
from infra.store.inputs import SourceError
from specs.errors import StageError
from tests.apertus_model.data.sources import compare, corpus_of
from tests.machine import slow

Write = Callable[[Path, list[str]], None]


def _jsonl(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def _parquet(folder: Path, texts: list[str]) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / "a.parquet", row_group_size=17)


def _stream(folder: Path, texts: list[str]) -> None:
    with pyarrow.ipc.new_stream(
        str(folder / "a.arrow"), pyarrow.schema({"text": pyarrow.large_string()})
    ) as writer:
        writer.write_table(
            pyarrow.table({"text": pyarrow.array(texts, pyarrow.large_string())}), max_chunksize=17
        )


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
            archive.create_warc_record(
                f"https://a.example/{number}", "conversion", payload=payload, warc_headers_dict=kind
            )
        )
    (folder / "a.warc.wet.gz").write_bytes(buffer.getvalue())


CONTAINERS: list[tuple[str, Write]] = [
    ("jsonl", lambda folder, texts: (folder / "a.jsonl").write_bytes(_jsonl(texts)) and None),
    (
        "jsonl",
        lambda folder, texts: (folder / "a.jsonl.gz").write_bytes(gzip.compress(_jsonl(texts))) and None,
    ),
    (
        "jsonl",
        lambda folder, texts: (
            (folder / "a.jsonl.zst").write_bytes(zstandard.compress(_jsonl(texts))) and None
        ),
    ),
    ("parquet", _parquet),
    ("arrow", _stream),
    ("arrow", _saved),
]


def test_the_container_of_the_documents_does_not_change_the_corpus(
    bench: Any, tmp_path: Path, tokenizer: Artifact, texts: list[str], expected: Artifact
) -> None:
    for number, (kind, write) in enumerate(CONTAINERS):
        folder = tmp_path / f"{kind}-{number}"
        folder.mkdir()
        write(folder, texts)
        compare(bench, folder.name, corpus_of(folder, kind), tokenizer, expected)


def test_text_in_a_web_archive_gives_the_same_corpus(
    bench: Any, tmp_path: Path, tokenizer: Artifact, texts: list[str], expected: Artifact
) -> None:
    (tmp_path / "archive").mkdir()
    _warc(tmp_path / "archive", texts)
    compare(bench, "archive", corpus_of(tmp_path / "archive", "warc"), tokenizer, expected)


@pytest.mark.parametrize("workers", [1, slow(2)])
def test_a_file_that_is_cut_off_ends_the_stage_with_its_name(
    bench: Any, tmp_path: Path, tokenizer: Artifact, texts: list[str], workers: int
) -> None:
    folder = tmp_path / "container"
    folder.mkdir()
    for name in ("a", "b", "c", "d"):
        (folder / f"{name}.jsonl.zst").write_bytes(
            zstandard.compress(_jsonl(texts))[: -8 if name == "c" else None]
        )
    with pytest.raises(
        StageError, match=r"cannot read '.*c\.jsonl\.zst' after document \d+, at about byte \d+: OSError"
    ):
        bench.run("corpus", "c", corpus_of(folder, "jsonl"), {"tokenizer": tokenizer}, workers=workers)
    assert not Artifact(bench.store, "corpus/c").complete


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("middle", [True, False])
def test_an_archive_that_is_cut_off_in_a_record_ends_the_stage_with_its_name(
    bench: Any, tmp_path: Path, tokenizer: Artifact, texts: list[str], compressed: bool, middle: bool
) -> None:
    folder = tmp_path / "container"
    folder.mkdir()
    _warc(folder, texts)
    path = folder / "a.warc.wet.gz"
    content = path.read_bytes()
    if not compressed:
        content = gzip.decompress(content)
        path = path.rename(folder / "a.warc.wet")
    member = content.rfind(b"\x1f\x8b\x08" if compressed else b"WARC/1", 0, len(content) // 2)
    path.write_bytes(content[: member + 40 if middle else -100])  # or in the last record
    with pytest.raises(
        SourceError, match=rf"cannot read '.*{path.name}' after document \d+, at about byte \d+: EOFError"
    ):
        bench.run("corpus", "c", corpus_of(folder, "warc"), {"tokenizer": tokenizer})
    assert not Artifact(bench.store, "corpus/c").complete


def test_rejections_of_rows_are_counted_in_the_manifest(
    bench: Any, tmp_path: Path, tokenizer: Artifact, texts: list[str]
) -> None:
    folder = tmp_path / "container"
    folder.mkdir()
    column = pyarrow.array([*(text.encode() for text in texts), b"\xff", b"", None]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), folder / "a.parquet")
    pyarrow.parquet.write_table(
        pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), folder / "b.parquet"
    )
    corpus = bench.run("corpus", "c", corpus_of(folder, "parquet"), {"tokenizer": tokenizer})
    assert corpus.manifest.metrics["rejected"] == {"not_utf8": 1, "empty": 2, "empty_file": 1}
    assert corpus.manifest.metrics["read"]["documents"] == 60


def test_a_tokenizer_is_trained_on_any_container(
    bench: Any, documents: Path, tmp_path: Path, texts: list[str], tokenizer: Artifact
) -> None:
    (tmp_path / "container").mkdir()
    _parquet(tmp_path / "container", texts)
    source = {"url": str(tmp_path / "container"), "format": "parquet"}
    same = bench.run(
        "tokenizer", "same", {"sources": [source], "vocab_size": 512, "bytes_per_source": 100_000}
    )
    assert same.bytes("tokenizer.json") == tokenizer.bytes("tokenizer.json")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"body": ["x"], "stars": [2.0]},
            "no column 'text'; there are body, stars. Fix: correct text_column",
        ),
        (
            {"text": [1, 2], "stars": [2.0, 3.0]},
            "column 'text' holds int64, not text. Fix: correct text_column",
        ),
        ({"text": ["x"]}, "no column 'stars'; there are text. Fix: correct metadata"),
        ({"text": ["x"], "stars": [[1.0]]}, "column 'stars' holds list<.*>; metadata are text, numbers"),
        ({"text": ["x"], "stars": ["many"]}, "column 'stars' holds 'many', which is not a number"),
    ],
)
def test_files_with_another_schema_half_way_end_the_stage_with_the_difference(
    bench: Any,
    tmp_path: Path,
    tokenizer: Artifact,
    texts: list[str],
    columns: dict[str, list[Any]],
    message: str,
) -> None:
    for number in range(4):
        rows = columns if number >= 2 else {"text": texts[number::2], "stars": [2.0] * len(texts[number::2])}
        pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / f"{number}.parquet")
    spec = corpus_of(tmp_path, "parquet")
    spec["process"]["filters"] = [{"filter": "score", "column": "stars", "min": 1}]
    with pytest.raises(SourceError, match=message) as raised:
        bench.run("corpus", "c", spec | {"files_per_task": 1}, {"tokenizer": tokenizer})
    assert "2.parquet" in str(raised.value)
    assert not Artifact(bench.store, "corpus/c").complete
