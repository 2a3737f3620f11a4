"""Features of documents: the texts, or their embeddings, in the order of the source, for any split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

from apertus_model.classifiers.transformer import Transformer
from infra.store import Artifact
from infra.store.inputs import SourceError
from tests.apertus_model.encoders import language_texts, write_encoder, write_rows


def _spec(folder: Path, files_per_task: int = 2, **changes: Any) -> dict[str, Any]:
    columns = [changes[name] for name in ("label_column", "language_column") if name in changes]
    return {
        "source": {"url": str(folder), "format": "jsonl", "metadata": columns},
        "files_per_task": files_per_task,
        "encoder": None,
        "max_characters": 1000,
        **changes,
    }


def _rows(artifact: Artifact) -> list[dict[str, Any]]:
    shards = artifact.manifest.facts["shards"]
    return [row for name in shards for row in pyarrow.parquet.read_table(artifact.local(name)).to_pylist()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three files of ten documents."""
    rows = [{"text": text, "label": language == "de"} for language, text in language_texts()[::20][:30]]
    for index in range(3):
        write_rows(tmp_path / "source" / f"{index}.jsonl", rows[index::3])
    return tmp_path / "source"


def test_texts_are_cut_and_have_their_labels(bench: Any, folder: Path) -> None:
    whole, split = (
        bench.run("features", f"f{size}", _spec(folder, size, label_column="label", max_characters=40))
        for size in (9, 1)
    )
    assert _rows(whole) == _rows(split)
    assert len(split.manifest.facts["shards"]) == 3 and split.manifest.metrics == {
        "documents": len(_rows(whole))
    }
    assert {row["label"] for row in _rows(whole)} == {"true", "false"}
    assert max(len(row["text"]) for row in _rows(whole)) == 40


def test_embeddings_are_the_encoders_however_work_is_split(bench: Any, folder: Path, tmp_path: Path) -> None:
    encoder = write_encoder(tmp_path / "encoder")
    stated = {"encoder": str(encoder), "max_tokens": 64, "precision": "float32"}
    one, two = (bench.run("features", f"w{size}", _spec(folder, size, encoder=stated)) for size in (1, 3))
    assert [row["embedding"] for row in _rows(one)] == [row["embedding"] for row in _rows(two)]
    texts = [row["text"] for row in _rows(bench.run("features", "t", _spec(folder)))]
    expected = Transformer(encoder, "encoder", "AutoModel", 64).embeddings(texts)
    np.testing.assert_array_equal([row["embedding"] for row in _rows(one)], expected)


@pytest.mark.parametrize(("label", "shown"), [(None, "None"), ("", "''"), ("two words", "'two words'")])
def test_a_document_without_a_usable_label_is_an_error(
    bench: Any, tmp_path: Path, label: str | None, shown: str
) -> None:
    write_rows(tmp_path / "source" / "a.jsonl", [{"text": "one", "label": label}])
    with pytest.raises(SourceError, match=rf"has {shown} in column 'label', which is no label"):
        bench.run("features", "f", _spec(tmp_path / "source", label_column="label"))


def test_a_source_without_the_label_column_is_an_error(bench: Any, tmp_path: Path) -> None:
    write_rows(tmp_path / "source" / "a.jsonl", [{"text": "one", "kind": "x"}])
    with pytest.raises(SourceError, match="'label'"):
        bench.run("features", "f", _spec(tmp_path / "source", label_column="label"))


def test_an_empty_source_is_an_error(bench: Any, tmp_path: Path) -> None:
    write_rows(tmp_path / "source" / "a.jsonl", [])
    with pytest.raises(SourceError, match="there is no document in"):
        bench.run("features", "f", _spec(tmp_path / "source"))
