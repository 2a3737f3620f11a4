from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from datatrove.pipeline.tokens.megatron_tokenizer import MegatronTokenizedFile

from apertus_model.data.megatron import TokenFile, TokenFileError, TokenFileWriter, token_dtype
from tests.numerics import Numerics, largest_difference

DOCUMENTS = [[1, 5, 6, 2], [1, 2], [1, 7, 8, 9, 10, 2]]


def _write(prefix: Path, dtype: str = "<u2") -> Path:
    with TokenFileWriter(prefix, dtype) as writer:
        for document in DOCUMENTS:
            writer.write(document)
    return prefix


@pytest.mark.parametrize("dtype", ["<u2", "<i4"])
def test_what_is_written_is_read(tmp_path: Path, dtype: str) -> None:
    file = TokenFile(_write(tmp_path / "corpus.v2", dtype), vocab_size=11)
    assert [file[i].tolist() for i in range(len(file))] == DOCUMENTS
    assert file.tokens.tolist() == [token for document in DOCUMENTS for token in document]
    assert file.document_indices.tolist() == [0, 1, 2, 3]
    assert file.dtype == np.dtype(dtype)
    file.verify()


@pytest.mark.parametrize(("dtype", "token_size"), [("<u2", 2), ("<i4", 4)])
def test_datatrove_writes_the_same_bytes(tmp_path: Path, dtype: str, token_size: int, numerics: Numerics) -> None:
    _write(tmp_path / "ours", dtype)
    theirs = MegatronTokenizedFile(str(tmp_path), "theirs", token_size=token_size)
    for document in DOCUMENTS:
        theirs.write(document)
    theirs.close()
    ours, others = ([(tmp_path / f"{name}.{suffix}").read_bytes() for suffix in ("bin", "idx")] for name in ("ours", "theirs"))
    numerics(
        "data",
        "bytes of .bin and .idx, uint16 and int32",
        source="Megatron-LM, IndexedDataset",
        against="datatrove, MegatronTokenizedFile",
        difference=largest_difference(ours, others),
        allowed=0.0,
    )


def test_large_vocabularies_are_stored_in_32_bits() -> None:
    assert [token_dtype(size).name for size in (4096, 65_499, 65_500, 131_072)] == ["uint16", "uint16", "int32", "int32"]


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
    with pytest.raises(TokenFileError, match=r"a\.idx has 94 bytes; 3 sequences and 4 document borders take 102"):
        TokenFile(prefix)


@pytest.mark.parametrize(
    ("offset", "value", "message"), [(0, b"X", "no Megatron index"), (9, b"\x02", "version 2"), (17, b"\x63", "dtype code 99")]
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


def test_sequences_that_do_not_lie_back_to_back_are_found_by_verify(tmp_path: Path) -> None:
    prefix = _write(tmp_path / "a")
    index = prefix.with_suffix(".idx")
    content = bytearray(index.read_bytes())
    content[34 + 3 * 4 + 8] += 2
    index.write_bytes(content)
    with pytest.raises(TokenFileError, match="sequence 1 begins at byte 10, the one before ends at 8"):
        TokenFile(prefix).verify()


def test_ids_that_do_not_fit_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="70000 do not fit into uint16"), TokenFileWriter(tmp_path / "a", "<u2") as writer:
        writer.write([1, 70_000])
    assert not (tmp_path / "a.idx").exists()
