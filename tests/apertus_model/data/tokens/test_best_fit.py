"""Best-fit packing of text: nothing is lost, nothing is cut that fits, and a row is what it says."""

from __future__ import annotations

import pickle
import tempfile
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apertus_model.data.order.samples import MixtureSamples
from apertus_model.data.tokens.best_fit import TABLES, PackedRows, RowsWriter
from apertus_model.data.tokens.goldfish import goldfish_mask
from apertus_model.data.tokens.megatron import TokenFile, TokenFileWriter
from apertus_model.data.tokens.stream import IGNORE_INDEX, TokenStream
from infra.store import StoreError
from specs.settings import Goldfish
from tests.apertus_model.mixtures import recipe_of, shards_of

EOS = 2


def _write(
    folder: Path, shards: list[list[int]], length: int
) -> tuple[TokenStream, dict[str, Path], RowsWriter]:
    """Shards of documents of the given sizes; token ids count up from 3, so that each is unique. The last
    of a document is EOS."""
    writer, following = RowsWriter(folder / "rows", length), 3
    for number, sizes in enumerate(shards):
        with TokenFileWriter(folder / f"s{number}", "<i4") as file:
            for size in sizes:
                file.write([*range(following, following + size - 1), EOS] if size else [])
                following += size
        writer.add(TokenFile(folder / f"s{number}").sizes)
    stream = TokenStream(shards_of([folder / f"s{number}" for number in range(len(shards))]))
    return stream, {name: folder / "rows" / f"{name}.npy" for name in TABLES}, writer


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=25), min_size=1, max_size=3),
    st.integers(2, 20),
)
def test_every_label_is_trained_once_and_only_long_documents_are_cut(
    shards: list[list[int]], length: int
) -> None:
    with tempfile.TemporaryDirectory() as name:
        stream, tables, writer = _write(Path(name), shards, length)
        packed = writer.close()
        rows = PackedRows(stream, tables, length, EOS, None)
        seen: list[tuple[int, int]] = []  # (input, label) of every trained place
        pieces = 0
        for row in range(len(rows)):
            sample = rows.sample(row, 0)
            spans = list(rows.pieces(row))
            pieces += len(spans)
            begin = 0
            for first, size in spans:
                text = stream.read(first, first + size)
                assert sample.input[begin : begin + size].tolist() == text.tolist()
                assert sample.positions[begin : begin + size].tolist() == list(range(size))
                assert sample.labels[begin : begin + size].tolist() == [*text[1:].tolist(), IGNORE_INDEX]
                seen += zip(text[:-1].tolist(), text[1:].tolist(), strict=True)
                begin += size
            assert (sample.input[begin:] == EOS).all()
            assert (sample.labels[begin:] == IGNORE_INDEX).all()
            assert sample.positions[begin:].tolist() == list(range(length - begin))
        everything = stream.read(0, len(stream)).tolist()
        expected = [(a, b) for a, b in pairwise(everything) if a != EOS]
        assert sorted(seen) == sorted(expected)
        sizes = [size for shard in shards for size in shard]
        fitting = sum(0 < size <= length for size in sizes)
        cut = [size for size in sizes if size > length]
        assert (packed.rows, packed.pieces, packed.documents, packed.tokens) == (
            len(rows),
            pieces,
            len(sizes),
            sum(sizes),
        )
        assert (packed.cut_documents, packed.cropped_tokens) == (len(cut), sum(cut))
        assert pieces >= fitting + 2 * len(cut)
        assert packed.padding == len(rows) * length - sum(
            size for row in range(len(rows)) for _, size in rows.pieces(row)
        )


def test_documents_that_windows_would_cut_are_counted(tmp_path: Path) -> None:
    # Windows of 8 begin at 0, 8, 16: the documents [0, 5), [5, 9), [9, 16), [16, 26) lie in them whole, cut,
    # whole, cut.
    _, _, writer = _write(tmp_path, [[5, 4, 7], [10]], 8)
    packed = writer.close()
    assert (packed.cut_by_windows, packed.cropped_by_windows) == (2, 14)
    # 10 tokens are a piece of 8 and one of 3 that begins with the last of them; 5 and 7 leave 3 and 1, where
    # 3 does not go into 7's row.
    assert (packed.cut_documents, packed.cropped_tokens, packed.pieces) == (1, 10, 5)


def test_goldfish_and_order_apply_to_packed_rows(tmp_path: Path) -> None:
    stream, tables, writer = _write(tmp_path, [[12, 30, 7, 9, 22, 5, 17] * 4, [9, 9, 40]], 16)
    rows = writer.close().rows
    recipe = recipe_of({"a": 1}, seed=1, vocab_size=10_000, eos_id=EOS)
    shards = shards_of([tmp_path / "s0", tmp_path / "s1"])
    plain = MixtureSamples.open(recipe, [shards], sequence_length=16, packed=[tables])
    masked = MixtureSamples.open(
        recipe, [shards], sequence_length=16, packed=[tables], goldfish=Goldfish(k=3, h=2)
    )
    assert plain.order.windows == (rows,)
    assert sorted(plain[i].input.tolist() for i in range(rows)) == sorted(
        PackedRows(stream, tables, 16, EOS, None).sample(row, 0).input.tolist() for row in range(rows)
    )
    for i in range(rows):
        mask = goldfish_mask(np.append(plain[i].input[1:], EOS), 3, 2)
        assert masked[i].labels.tolist() == np.where(mask, IGNORE_INDEX, plain[i].labels).tolist()
    there = pickle.loads(pickle.dumps(masked))
    assert all(there[i].labels.tolist() == masked[i].labels.tolist() for i in range(rows))


def test_rows_of_another_corpus_are_refused(tmp_path: Path) -> None:
    for name, sizes in (("long", [30, 30, 30]), ("short", [4])):
        (tmp_path / name).mkdir()
        _, _, writer = _write(tmp_path / name, [sizes], 8)
        writer.close()
    tables = {name: tmp_path / "long" / "rows" / f"{name}.npy" for name in TABLES}
    with pytest.raises(StoreError, match=r"rows\.npy is not of a stream of 4 tokens"):
        PackedRows(TokenStream(shards_of([tmp_path / "short" / "s0"])), tables, 8, EOS, None)
