"""A shard is the sorted documents of its keys, in however many cells they come."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from apertus_model.data.corpora.shuffle import DOCUMENTS, shuffle_keys, token_column, write_shard
from apertus_model.data.tokens.megatron import TokenFile


@pytest.mark.parametrize("cells", [1, 5])
def test_documents_are_in_the_order_of_their_keys(cells: int, tmp_path: Path) -> None:
    texts = np.arange(100, dtype=np.uint64)
    copies = np.zeros(100, np.uint32)
    keys = shuffle_keys(texts, copies, 3, "train")
    sizes = np.arange(100) % 4 + 1
    tokens = np.repeat(np.arange(100), sizes).astype("<u2")
    nulls = [pa.nulls(100, pa.large_string())] * 5
    arrays = [pa.array(keys), pa.array(texts), pa.array(copies), token_column(tokens, sizes), *nulls]
    table = pa.Table.from_arrays(arrays, schema=DOCUMENTS)
    order = np.argsort(keys)
    parts = [table.take(pa.array(np.sort(part))) for part in np.array_split(order, cells)]
    files, documents, count = write_shard(parts, tmp_path / "train-00000", "<u2")
    file = TokenFile(tmp_path / "train-00000")
    file.verify()
    assert (documents, count) == (100, int(sizes.sum()))
    assert [file[i].tolist() for i in range(100)] == [[i] * int(sizes[i]) for i in order]
    assert sorted(files) == ["train-00000.bin", "train-00000.documents.parquet", "train-00000.idx"]


def test_copies_of_a_text_are_spread() -> None:
    keys = shuffle_keys(np.full(8, 7, np.uint64), np.arange(8), 3, "train")
    assert len(set(keys.tolist())) == 8 and int(keys.max()) - int(keys.min()) > 2**62
