from __future__ import annotations

import pickle
import struct
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datatrove.pipeline.tokens.megatron_tokenizer import MegatronTokenizedFile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from apertus_model.data.tokens.megatron import TokenFile, TokenFileError, TokenFileWriter, token_dtype
from tests.numerics import Numerics, largest_difference

DOCUMENTS = [[1, 5, 6, 2], [1, 2], [1, 7, 8, 9, 10, 2]]


def _write(prefix: Path, dtype: str = "<u2") -> Path:
    with TokenFileWriter(prefix, dtype) as writer:
        for document in DOCUMENTS:
            writer.write(document)
    return prefix


@pytest.mark.parametrize("dtype", ["<u2", "<i4"])
def test_written_files_read_back(tmp_path: Path, dtype: str) -> None:
    file = TokenFile(_write(tmp_path / "corpus.v2", dtype), vocab_size=11)
    assert [file[i].tolist() for i in range(len(file))] == DOCUMENTS
    assert file.tokens.tolist() == [token for document in DOCUMENTS for token in document]
    assert file.document_indices.tolist() == [0, 1, 2, 3]
    assert file.dtype == np.dtype(dtype)
    file.verify()


@pytest.mark.parametrize(("dtype", "token_size"), [("<u2", 2), ("<i4", 4)])
def test_datatrove_writes_the_same_bytes(
    tmp_path: Path, dtype: str, token_size: int, numerics: Numerics
) -> None:
    _write(tmp_path / "ours", dtype)
    theirs = MegatronTokenizedFile(str(tmp_path), "theirs", token_size=token_size)
    for document in DOCUMENTS:
        theirs.write(document)
    theirs.close()
    ours, others = (
        [(tmp_path / f"{name}.{suffix}").read_bytes() for suffix in ("bin", "idx")]
        for name in ("ours", "theirs")
    )
    numerics(
        "data",
        "bytes of .bin and .idx, uint16 and int32",
        source="Megatron-LM, IndexedDataset",
        against="datatrove, MegatronTokenizedFile",
        difference=largest_difference(ours, others),
        allowed=0.0,
    )


def test_large_vocabularies_are_stored_in_32_bits() -> None:
    assert [token_dtype(size).name for size in (4096, 65_499, 65_500, 131_072)] == [
        "uint16",
        "uint16",
        "int32",
        "int32",
    ]


def test_a_file_without_documents_is_readable(tmp_path: Path) -> None:
    TokenFileWriter(tmp_path / "none", "<u2").close()
    file = TokenFile(tmp_path / "none")
    assert len(file) == 0
    assert file.tokens.size == 0


def test_the_two_files_may_lie_apart(tmp_path: Path) -> None:
    prefix = _write(tmp_path / "a")
    index = prefix.with_suffix(".idx").rename(tmp_path / "elsewhere.idx")
    assert TokenFile(tmp_path / "a.bin", index)[1].tolist() == [1, 2]


def test_a_pickled_file_travels_as_its_path(tmp_path: Path) -> None:
    file = TokenFile(_write(tmp_path / "a"), vocab_size=11)
    data = pickle.dumps(file)
    again = pickle.loads(data)
    assert again.tokens.tolist() == file.tokens.tolist()
    assert again.vocab_size == 11
    assert len(data) < 500


def test_a_cut_off_bin_is_refused_with_both_lengths(tmp_path: Path) -> None:
    prefix = _write(tmp_path / "a")
    data = prefix.with_suffix(".bin")
    data.write_bytes(data.read_bytes()[:-2])
    with pytest.raises(TokenFileError, match=r"a\.bin has 22 bytes; .* 3 sequences end at byte 24"):
        TokenFile(prefix)


def test_a_cut_off_index_is_refused_with_both_lengths(tmp_path: Path) -> None:
    prefix = _write(tmp_path / "a")
    index = prefix.with_suffix(".idx")
    index.write_bytes(index.read_bytes()[:-8])
    with pytest.raises(
        TokenFileError, match=r"a\.idx has 94 bytes; 3 sequences and 4 document boundaries take 102"
    ):
        TokenFile(prefix)


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [(0, b"X", "not a Megatron index"), (9, b"\x02", "version 2"), (17, b"\x63", "dtype code 99")],
)
def test_a_wrong_header_is_refused(tmp_path: Path, offset: int, value: bytes, message: str) -> None:
    prefix = _write(tmp_path / "a")
    index = prefix.with_suffix(".idx")
    content = bytearray(index.read_bytes())
    content[offset : offset + 1] = value
    index.write_bytes(content)
    with pytest.raises(TokenFileError, match=message):
        TokenFile(prefix)


def test_an_id_outside_of_the_vocabulary_is_found_when_it_is_read(tmp_path: Path) -> None:
    file = TokenFile(_write(tmp_path / "a"), vocab_size=10)
    assert file[0].tolist() == DOCUMENTS[0]
    with pytest.raises(TokenFileError, match=r"token id 10 .* the vocabulary has 10"):
        _ = file[2]


def test_verify_finds_gaps_between_sequences(tmp_path: Path) -> None:
    prefix = _write(tmp_path / "a")
    index = prefix.with_suffix(".idx")
    content = bytearray(index.read_bytes())
    content[34 + 3 * 4 + 8] += 2
    index.write_bytes(content)
    with pytest.raises(TokenFileError, match="sequence 1 begins at byte 10, the one before ends at 8"):
        TokenFile(prefix).verify()


def test_ids_that_do_not_fit_are_not_written(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="70000 do not fit into uint16"),
        TokenFileWriter(tmp_path / "a", "<u2") as writer,
    ):
        writer.write([1, 70_000])
    assert not (tmp_path / "a.idx").exists()


def test_a_document_that_the_format_cannot_count_is_not_written(tmp_path: Path) -> None:
    endless = np.lib.stride_tricks.as_strided(np.zeros(1, "<u2"), shape=(2**31,), strides=(0,))
    with (
        pytest.raises(ValueError, match="2147483648 tokens; the format counts to 2147483647"),
        TokenFileWriter(tmp_path / "a", "<u2") as file,
    ):
        file.write(endless)


# The format as its description has it, without this package: what a document is made of is a list of
# sequences.


def _described(prefix: Path, code: int, dtype: str, documents: list[list[list[int]]]) -> Path:
    """The index: magic, version, type, counts; then lengths in tokens, offsets in bytes, first sequences
    of documents and the end."""
    sequences = [sequence for document in documents for sequence in document]
    width = np.dtype(dtype).itemsize
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(sequences), len(documents) + 1)
    index += b"".join(struct.pack("<i", len(sequence)) for sequence in sequences)
    index += b"".join(
        struct.pack("<q", width * sum(map(len, sequences[:number]))) for number in range(len(sequences))
    )
    index += b"".join(
        struct.pack("<q", sum(map(len, documents[:number]))) for number in range(len(documents) + 1)
    )
    prefix.with_suffix(".idx").write_bytes(index)
    prefix.with_suffix(".bin").write_bytes(
        np.array([token for sequence in sequences for token in sequence], dtype).tobytes()
    )
    return prefix


@pytest.mark.parametrize(
    ("code", "dtype"), [(1, "u1"), (2, "i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2")]
)
def test_a_file_written_from_the_description_is_read(tmp_path: Path, code: int, dtype: str) -> None:
    documents = [[[1, 5], [6, 2]], [[]], [[7, 8, 9], [], [10]]]
    file = TokenFile(_described(tmp_path / "a", code, dtype, documents), vocab_size=11)
    file.verify()
    assert file.documents == 3
    assert [file.document(number).tolist() for number in range(3)] == [[1, 5, 6, 2], [], [7, 8, 9, 10]]
    assert [file[number].tolist() for number in range(6)] == [[1, 5], [6, 2], [], [7, 8, 9], [], [10]]


@pytest.fixture(scope="module")
def megatron() -> Any:
    """megatron-core's module, where somebody installed it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("megatron.core.datasets.indexed_dataset")


@pytest.mark.parametrize("dtype", ["<u2", "<i4"])
def test_megatron_reads_what_is_written(tmp_path: Path, megatron: Any, dtype: str) -> None:
    with TokenFileWriter(tmp_path / "a", dtype) as writer:
        for document in [*DOCUMENTS, []]:
            writer.write(document)
    theirs = megatron.IndexedDataset(str(tmp_path / "a"))
    assert [theirs[number].tolist() for number in range(len(theirs))] == [*DOCUMENTS, []]
    assert theirs.document_indices.tolist() == [0, 1, 2, 3, 4]
    assert theirs[0].dtype == np.dtype(dtype)


def test_files_written_by_megatron_are_read(tmp_path: Path, megatron: Any) -> None:
    import torch

    builder = megatron.IndexedDatasetBuilder(
        str(tmp_path / "a.bin"), dtype=megatron.DType.optimal_dtype(65_499)
    )
    builder.add_document([1, 5, 6, 2], lengths=[3, 1])
    builder.add_item(torch.tensor([1, 2]))
    builder.end_document()
    builder.finalize(str(tmp_path / "a.idx"))
    file = TokenFile(tmp_path / "a", vocab_size=7)
    file.verify()
    assert file.dtype == token_dtype(65_499)
    assert [file.document(number).tolist() for number in range(file.documents)] == [[1, 5, 6, 2], [1, 2]]


# Damage


def _index_with(prefix: Path, table: str, number: int, value: int) -> None:
    """Overwrites one entry of the index of the three DOCUMENTS."""
    offset, width = {"sizes": (34, 4), "pointers": (46, 8), "documents": (70, 8)}[table]
    index = prefix.with_suffix(".idx")
    content = bytearray(index.read_bytes())
    content[offset + number * width : offset + (number + 1) * width] = value.to_bytes(
        width, "little", signed=True
    )
    index.write_bytes(content)


@pytest.mark.parametrize(
    ("table", "number", "value", "message"),
    [
        ("sizes", 1, -1, "sequence 1 has -1 tokens"),
        ("sizes", 1, 3, "sequence 2 begins at byte 12, the one before ends at 14"),
        ("pointers", 1, 2**40, "sequence 1 begins at byte 1099511627776, the one before ends at 8"),
        ("documents", 1, 0, "document 0 has the sequences 0 to -1; every document has one at least"),
        (
            "documents",
            2,
            2**40,
            "document 2 has the sequences 1099511627776 to 2; every document has one at least",
        ),
        ("documents", 2, -5, "document 1 has the sequences 1 to -6"),
    ],
)
def test_verify_finds_wrong_document_boundaries(
    tmp_path: Path, table: str, number: int, value: int, message: str
) -> None:
    prefix = _write(tmp_path / "a")
    _index_with(prefix, table, number, value)
    with pytest.raises(TokenFileError, match=message):
        TokenFile(prefix).verify()


def test_more_documents_than_sequences_are_refused(tmp_path: Path) -> None:
    prefix = _described(tmp_path / "a", 8, "<u2", [[[1]], [], [[2]]])
    with pytest.raises(TokenFileError, match="3 documents and only 2 sequences"):
        TokenFile(prefix)


def test_negative_ids_are_found_without_a_vocabulary(tmp_path: Path) -> None:
    prefix = _described(tmp_path / "a", 4, "<i4", [[[1, -2]]])
    with pytest.raises(TokenFileError, match="holds token id -2 between tokens 0 and 2"):
        TokenFile(prefix).verify()


def _documents(prefix: Path) -> list[list[int]]:
    file = TokenFile(prefix, vocab_size=2**15)
    file.verify()
    return [file.document(number).tolist() for number in range(file.documents)]


@given(
    documents=st.lists(st.lists(st.integers(0, 2**15 - 1), max_size=9), max_size=9),
    dtype=st.sampled_from(["<u2", "<i4"]),
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_documents_of_any_lengths_come_back(tmp_path: Path, documents: list[list[int]], dtype: str) -> None:
    with TokenFileWriter(tmp_path / "a", dtype) as writer:
        for document in documents:
            writer.write(document)
    assert _documents(tmp_path / "a") == documents


@given(
    data=st.data(),
    documents=st.lists(st.lists(st.integers(0, 2**15 - 1), max_size=5), min_size=1, max_size=6),
)
@settings(max_examples=500, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_index_gives_the_same_documents_or_an_error(
    tmp_path: Path, data: st.DataObject, documents: list[list[int]]
) -> None:
    dtype = data.draw(st.sampled_from(["<u2", "<i4"]))
    with TokenFileWriter(tmp_path / "a", dtype) as writer:
        for document in documents:
            writer.write(document)
    index = tmp_path / "a.idx"
    content = bytearray(index.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1), label="place")
    match data.draw(st.sampled_from(["flip", "cut", "drop", "insert"]), label="damage"):
        case "flip":
            content[place] = data.draw(st.integers(0, 255), label="byte")
        case "cut":
            del content[place:]
        case "drop":
            del content[place]
        case "insert":
            content.insert(place, data.draw(st.integers(0, 255), label="byte"))
    index.write_bytes(content)
    try:
        assert _documents(tmp_path / "a") == documents
    except TokenFileError as error:
        assert "a." in str(error)


@given(data=st.data())
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_part_of_the_tokens_missing_is_an_error(tmp_path: Path, data: st.DataObject) -> None:
    prefix = _write(tmp_path / "a")
    path = prefix.with_suffix(".bin")
    content = path.read_bytes()
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(TokenFileError, match=r"a\.bin has \d+ bytes; .* end at byte 24"):
        TokenFile(prefix)
