"""Token files in Megatron's `.bin/.idx` format: memory-mapped reading, and writing.

Invariants:
- The format is that of Megatron's `IndexedDataset` and datatrove's `MegatronDocumentTokenizer`: little
  endian, a header, then sizes (int32), byte pointers (int64), document indices (int64).
- Opening costs the same for a kilobyte and a terabyte: the header and the first and last entries are compared
  with the lengths of both files; token ids are compared with the vocabulary when they are read. `verify`
  compares everything. In a file with one sequence per document it finds every wrong document boundary; with
  several sequences per document, the format has nothing to check boundaries against.

Files are written with one sequence per document, back to back, so that the `.bin` is also one stream of
tokens. Documents of several sequences, as other programs write them, can be read.
"""

import functools
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from specs.errors import StageError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
HEADER_BYTES = _HEADER.size
# Megatron's dtype codes; writing uses 4 and 8 only.
_DTYPES: dict[int, np.dtype] = {
    1: np.dtype("u1"), 2: np.dtype("i1"), 3: np.dtype("<i2"), 4: np.dtype("<i4"), 5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}  # fmt: skip
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
BLOCK = 2**16
"""The block size, in sequences, documents or tokens, in which `verify` checks and an index is completed."""


class TokenFileError(StageError):
    """An inconsistent `.bin/.idx` pair; the message names the file and the numbers."""


def token_dtype(vocab_size: int) -> np.dtype:
    """The type in which Megatron stores ids of a vocabulary: uint16 below 65,500, int32 from there on."""
    return np.dtype("<u2") if vocab_size < 65_500 else np.dtype("<i4")


class IndexHeader(NamedTuple):
    """The first `HEADER_BYTES` of an `.idx`."""

    dtype: np.dtype  # of a token
    sequences: int  # number of sequences
    boundaries: int  # number of documents + 1

    @property
    def pointers_at(self) -> int:
        return HEADER_BYTES + 4 * self.sequences

    @property
    def documents_at(self) -> int:
        return self.pointers_at + 8 * self.sequences

    @property
    def end(self) -> int:
        return self.documents_at + 8 * self.boundaries


def read_header(header: bytes, index: Path | str) -> IndexHeader:
    """The header of an `.idx`, which errors call `index`. TokenFileError for bytes that are none."""
    if len(header) < HEADER_BYTES:
        raise TokenFileError(f"{index} has {len(header)} bytes; the header alone takes {HEADER_BYTES}")
    magic, version, code, sequences, boundaries = _HEADER.unpack(header)
    if magic != MAGIC:
        raise TokenFileError(f"{index} begins with {magic!r}, not {MAGIC!r}: it is not a Megatron index")
    if version != VERSION or code not in _DTYPES:
        raise TokenFileError(
            f"{index} has version {version} and dtype code {code}; known are version 1 and codes"
            f" {sorted(_DTYPES)}"
        )
    return IndexHeader(_DTYPES[code], sequences, boundaries)


def check_index(
    load: Callable[[int, int], bytes], index_bytes: int, data_bytes: int, index: Path | str, data: Path | str
) -> IndexHeader:
    """Compares the header and the first and last entries of an `.idx` with the lengths of both files. `load`:
    returns the bytes [start, stop) of the index; `index`, `data`: the names of the files in errors.
    TokenFileError when they do not fit together."""
    header = read_header(load(0, min(HEADER_BYTES, index_bytes)), index)
    count, boundaries = header.sequences, header.boundaries
    if index_bytes != header.end:
        raise TokenFileError(
            f"{index} has {index_bytes} bytes; {count} sequences and {boundaries} document boundaries take"
            f" {header.end}"
        )

    def entry(width: int, start: int) -> int:
        return int.from_bytes(load(start, start + width), "little", signed=True)

    end = 0
    if count:
        end = entry(8, header.documents_at - 8) + entry(4, header.pointers_at - 4) * header.dtype.itemsize
    if end != data_bytes or (count and entry(8, header.pointers_at) != 0):
        raise TokenFileError(
            f"{data} has {data_bytes} bytes; by {Path(index).name} its {count} sequences end at byte {end}"
        )
    if not boundaries or entry(8, header.documents_at) != 0 or entry(8, header.end - 8) != count:
        raise TokenFileError(
            f"{index} has {count} sequences, but its documents do not begin at 0 and end at {count}"
        )
    if boundaries > count + 1:
        raise TokenFileError(
            f"{index} has {boundaries - 1} documents and only {count} sequences; every document has at least"
            " one"
        )
    return header


def open_index(index: Path, data: Path | str, data_bytes: int) -> IndexHeader:
    """The header of a local `.idx`, compared with the length of its `.bin` as by `check_index`."""
    with index.open("rb") as file:

        def read(start: int, stop: int) -> bytes:
            file.seek(start)
            return file.read(stop - start)

        return check_index(read, index.stat().st_size, data_bytes, index, data)


def sequence_sizes(index: Path, data: Path | str, data_bytes: int) -> NDArray[np.int32]:
    """(number of sequences,), int32, memory-mapped: the tokens of each sequence, by a local `.idx`. `data`,
    `data_bytes`: name and length of its `.bin`, which is not read. TokenFileError as `check_index`."""
    return _map(index, "<i4", HEADER_BYTES, open_index(index, data, data_bytes).sequences)


class TokenFile:
    """A read-only view of a `.bin` (or the path of both without suffix) and its `.idx` (by default the one
    beside it), pickled by their paths. Ids that are read are compared with `vocab_size`, if it is given.
    TokenFileError when header, lengths and counts do not fit together, FileNotFoundError for a missing file.

    `tokens`: (number of tokens,), memory-mapped: all documents back to back. `sizes`: (number of sequences,),
    int32, in tokens. `document_indices`: (number of documents + 1,), int64: first sequences, and the end."""

    def __init__(
        self, path: Path | str, index: Path | str | None = None, *, vocab_size: int | None = None
    ) -> None:
        prefix = Path(str(path).removesuffix(".bin"))
        self.path = data = _with_suffix(prefix, ".bin")
        self.index = index = Path(index) if index else _with_suffix(prefix, ".idx")
        self.vocab_size = vocab_size
        data_bytes = data.stat().st_size
        header = open_index(index, data, data_bytes)
        self.dtype = header.dtype
        self.sizes: NDArray[np.int32] = _map(index, "<i4", HEADER_BYTES, header.sequences)
        self._pointers: NDArray[np.int64] = _map(index, "<i8", header.pointers_at, header.sequences)
        self.document_indices: NDArray[np.int64] = _map(index, "<i8", header.documents_at, header.boundaries)
        self.tokens: NDArray[np.integer] = _map(data, self.dtype, 0, data_bytes // self.dtype.itemsize)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(TokenFile, vocab_size=self.vocab_size), (self.path, self.index)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> NDArray[np.integer]:
        """The tokens of one sequence: (size,), `dtype`."""
        place = self.place(index)
        return self.read(place.start, place.stop)

    def place(self, index: int) -> slice:
        """The place of one sequence among all tokens."""
        start = int(self._pointers[index]) // self.dtype.itemsize
        return slice(start, start + int(self.sizes[index]))

    @property
    def documents(self) -> int:
        return len(self.document_indices) - 1

    def document(self, index: int) -> NDArray[np.integer]:
        """The tokens of all sequences of a document. Correct only for a file that `verify` has accepted."""
        first, end = int(self.document_indices[index]), int(self.document_indices[index + 1])
        start = int(self._pointers[first]) // self.dtype.itemsize
        stop = int(self._pointers[end]) // self.dtype.itemsize if end < len(self) else self.tokens.size
        return self.read(start, stop)

    def read(self, start: int, stop: int) -> NDArray[np.integer]:
        """The tokens [start, stop) of the stream. TokenFileError for an id outside of the vocabulary."""
        tokens = self.tokens[start:stop]
        if self.vocab_size is not None and (worst := id_outside(tokens, self.vocab_size)) is not None:
            raise TokenFileError(
                f"{self.path} holds token id {worst} between tokens {start} and {stop}; the vocabulary has"
                f" {self.vocab_size}"
            )
        return tokens

    def verify(self) -> None:
        """Reads everything, a block at a time. TokenFileError unless sequences are back to back, each
        document has one, and ids are in the vocabulary (if it is unknown, not negative)."""
        end = 0
        for start in range(0, len(self), BLOCK):
            sizes = self.sizes[start : start + BLOCK].astype(np.int64)
            if (negative := np.flatnonzero(sizes < 0)).size:
                first = int(negative[0])
                raise TokenFileError(f"{self.index}: sequence {start + first} has {sizes[first]} tokens")
            ends = end + np.cumsum(sizes) * self.dtype.itemsize
            pointers = self._pointers[start : start + BLOCK]
            if (wrong := np.flatnonzero(pointers != ends - sizes * self.dtype.itemsize)).size:
                first = int(wrong[0])
                before = int(ends[first] - sizes[first] * self.dtype.itemsize)
                raise TokenFileError(
                    f"{self.index}: sequence {start + first} begins at byte {pointers[first]}, the one before"
                    f" ends at {before}"
                )
            end = int(ends[-1])
        for start in range(0, self.documents, BLOCK):
            if (empty := np.flatnonzero(np.diff(self.document_indices[start : start + BLOCK + 1]) < 1)).size:
                first = start + int(empty[0])
                raise TokenFileError(
                    f"{self.index}: document {first} has the sequences {self.document_indices[first]} to "
                    f"{self.document_indices[first + 1] - 1}; every document has one at least"
                )
        for start in range(0, self.tokens.size, BLOCK):
            block = self.read(start, min(start + BLOCK, self.tokens.size))
            if self.vocab_size is None and block.min() < 0:
                place = f"between tokens {start} and {start + block.size}"
                raise TokenFileError(f"{self.path} holds token id {block.min()} {place}")


class TokenFileWriter:
    """A context manager that writes `<prefix>.bin`, document by document, in bounded memory, and completes
    `<prefix>.idx`. ValueError for an id beyond the dtype, and for a document of 2**31 tokens or more."""

    def __init__(self, prefix: Path | str, dtype: DTypeLike) -> None:
        self.prefix = Path(prefix)
        self.dtype = np.dtype(dtype)
        self.documents = self.tokens = 0
        self._code = _CODES[self.dtype]
        self._file = _with_suffix(self.prefix, ".bin").open("wb")
        self._index = _with_suffix(self.prefix, ".idx").open("wb+")
        self._index.write(bytes(HEADER_BYTES))  # the header comes last: without it no reader accepts the pair

    def write(self, tokens: NDArray[np.integer] | Iterable[int]) -> None:
        """Appends one document: ids of shape (n,), any integer type."""
        ids = tokens if isinstance(tokens, np.ndarray) else np.fromiter(tokens, dtype=np.int64)
        limits, most = np.iinfo(self.dtype), np.iinfo(np.int32).max
        if ids.dtype != self.dtype and ids.size and not limits.min <= ids.min() <= ids.max() <= limits.max:
            unfit = f"token ids from {ids.min()} to {ids.max()} do not fit into {self.dtype}"
            raise ValueError(f"{unfit} ({self.prefix}.bin)")
        if ids.size > most:
            raise ValueError(
                f"a document of {ids.size} tokens; the format counts to {most} ({self.prefix}.bin)"
            )
        self.write_many(ids.astype(self.dtype, copy=False), np.array([ids.size], "<i4"))

    def write_many(self, tokens: NDArray[np.integer], sizes: NDArray[np.int32]) -> None:
        """Appends documents of the given sizes, which are back to back in `tokens`, in this file's dtype."""
        assert tokens.dtype == self.dtype and tokens.size == sizes.sum(dtype=np.int64)
        self._file.write(tokens.data)
        self._index.write(sizes.astype("<i4", copy=False).tobytes())
        self.documents += len(sizes)
        self.tokens += int(tokens.size)

    def close(self) -> None:
        """Completes the index."""
        self._file.close()
        count = self.documents
        with self._index as file:
            end = 0
            for start in range(0, count, BLOCK):
                file.seek(HEADER_BYTES + 4 * start)
                sizes = np.frombuffer(file.read(4 * min(BLOCK, count - start)), "<i4").astype("<i8")
                ends = end + np.cumsum(sizes) * self.dtype.itemsize
                file.seek(HEADER_BYTES + 4 * count + 8 * start)
                file.write((ends - sizes * self.dtype.itemsize).tobytes())
                end = int(ends[-1])
            file.seek(HEADER_BYTES + 12 * count)
            for start in range(0, count + 1, BLOCK):
                file.write(np.arange(start, min(start + BLOCK, count + 1), dtype="<i8").tobytes())
            file.seek(0)
            file.write(_HEADER.pack(MAGIC, VERSION, self._code, count, count + 1))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()
            self._index.close()
            Path(self._index.name).unlink()


def id_outside(tokens: NDArray[np.integer], vocab_size: int) -> int | None:
    """An id in `tokens` that is negative or at least `vocab_size`; None when there is no such id."""
    # Seen as unsigned, a negative id is larger than any other of its type: one pass instead of two.
    limit = min(vocab_size, 2 ** (8 * tokens.itemsize - (tokens.dtype.kind == "i")))
    if not tokens.size or tokens.view(f"<u{tokens.itemsize}").max() < limit:
        return None
    return int(tokens.min() if tokens.min() < 0 else tokens.max())


def _with_suffix(prefix: Path, suffix: str) -> Path:
    """The prefix with a suffix; `Path.with_suffix` would cut `corpus.v2` short."""
    return prefix.with_name(prefix.name + suffix)


def _map(path: Path, dtype: DTypeLike, offset: int, count: int) -> NDArray:
    """A read-only array over a part of a file; an empty part cannot be mapped and gives an empty array."""
    if not count:
        return np.empty(0, dtype=dtype)
    # A plain ndarray over the map: slices of np.memmap are much slower to make.
    return np.asarray(np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,)))
