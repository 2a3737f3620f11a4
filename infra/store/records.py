"""Defines what a marker states about a file, and checks it.

A record is `{"size", "sha256"}`, of the whole content. A file longer than one piece also has `"piece_bytes"`,
and the SHA-256 of each consecutive piece of that length (the last one may be shorter) under `"pieces"`, so
that a reader of a part checks just that part:

    up to `INLINE` pieces     a list of hexadecimal digests
    more                      the digest of a sidecar `.<name>.pieces`: 32 bytes of each digest, in order

So a manifest grows by 200 bytes with a file of any length, and a reader loads 32 bytes per MiB that it opens.

Invariant: names and records that come out of a marker are data of the store, whose writer is unknown: they
are read as `FileRecord`, `StorePath` or `SingleName`, which check them.
"""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, model_validator

from specs.foreign import Foreign
from specs.redaction import MaskedError

PIECE_BYTES = 2**20
"""1 MiB: a window of 4,096 tokens costs 0.6 ms of hashing when its piece is first touched, or a request of
1 MiB from remote storage."""
WHOLE_BYTES = 64 * 2**20
"""Up to this length, a file that another program wrote may have no digests of pieces; its readers then hold
all of it."""
INLINE = 8
DIGEST_BYTES = 32
FIX = "`apertus verify --all --fix` withdraws it, so that it is made again"
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class StoreError(MaskedError, RuntimeError):
    """A store that does not hold what it should, or refuses an operation. The message has the fix."""


class DamagedError(StoreError):
    """Committed data that are missing, or are not what was committed."""


class DamagedCheckpoint(DamagedError):
    """A damaged checkpoint. `artifact`: the path of its artifact in the store."""

    def __init__(self, message: str, artifact: str, step: int) -> None:
        super().__init__(message, artifact, step)  # all arguments, so that the error can be pickled
        self.artifact, self.step = artifact, step

    def __str__(self) -> str:
        return str(self.args[0])


def inside(name: Any, what: str) -> str:
    """A relative path that stays in its folder, else StoreError. `what` says where it was found."""
    if (
        not isinstance(name, str)
        or not name
        or name.startswith("/")
        or any(part in ("", ".", "..") for part in name.split("/"))
        or any(sign in name for sign in ("\\", "\0"))
    ):
        raise StoreError(f"{what} names {name!r}, which is not a path inside the store")
    return name


def one_name(name: Any, what: str) -> str:
    """The name of a folder or file, without a path."""
    if "/" in inside(name, what):
        outside = "which is not a path inside the store: a single name is expected"
        raise StoreError(f"{what} names {name!r}, {outside}")
    return str(name)


def _as_value_error(check: Callable[[Any, str], str]) -> Callable[[str], str]:
    """A check as a Pydantic validator."""

    def validate(name: str) -> str:
        try:
            return check(name, "it")
        except StoreError as error:
            raise ValueError(str(error)) from None

    return validate


StorePath = Annotated[str, AfterValidator(_as_value_error(inside))]
SingleName = Annotated[str, AfterValidator(_as_value_error(one_name))]


def _count_of_pieces(size: int, piece_bytes: int) -> int:
    return -(-size // piece_bytes)


class FileRecord(Foreign):
    """The record of a file in a marker."""

    size: Annotated[int, Field(ge=0, le=2**63)]  # in bytes
    sha256: Sha256
    piece_bytes: Annotated[int, Field(ge=1)] | None = None  # length of a piece, if the file has several
    pieces: Sha256 | list[Sha256] | None = None  # digests of the pieces, or the digest of their sidecar

    @model_validator(mode="after")
    def _as_many_digests_as_pieces(self) -> Self:
        if self.pieces is not None and self.piece_bytes is None:
            raise ValueError("it states digests of pieces, but not their length, piece_bytes")
        if isinstance(self.pieces, list) and self.piece_bytes is not None:
            expected = _count_of_pieces(self.size, self.piece_bytes)
            if len(self.pieces) != expected:
                digests = f"{len(self.pieces)} digests of pieces"
                raise ValueError(f"it states {digests}, and the file has {expected} pieces")
        return self


class LocatedRecord(FileRecord):
    """The record of a file that is not where its name says."""

    path: StorePath


def sidecar_path(path: str) -> str:
    """The place of the digests of a file's pieces, if there are many."""
    place = PurePosixPath(path)
    return str(place.with_name(f".{place.name}.pieces"))


def used_path(path: str) -> str:
    """The place of the mark that a file of a unit was used up and then removed."""
    place = PurePosixPath(path)
    return str(place.with_name(f".{place.name}.used"))


def sidecar_record(record: FileRecord) -> FileRecord:
    """The record of the sidecar of a file in many pieces."""
    assert isinstance(record.pieces, str) and record.piece_bytes is not None, "it has a sidecar"
    size = _count_of_pieces(record.size, record.piece_bytes) * DIGEST_BYTES
    # read whole, whatever its length
    return FileRecord(size=size, sha256=record.pieces, piece_bytes=size, pieces=[record.pieces])


def piece_digests(data: bytes | memoryview, piece_bytes: int) -> list[bytes]:
    """SHA-256 of the consecutive pieces of `data`: 32 bytes each."""
    view = memoryview(data)
    return [
        hashlib.sha256(view[start : start + piece_bytes]).digest()
        for start in range(0, len(view), piece_bytes)
    ]


def make_record(
    size: int, sha256: str, pieces: Sequence[bytes], piece_bytes: int
) -> tuple[FileRecord, bytes | None]:
    """A record, and the content of its sidecar if it needs one."""
    if len(pieces) <= 1:
        return FileRecord(size=size, sha256=sha256), None
    sidecar = b"".join(pieces) if len(pieces) > INLINE else None
    digests = [piece.hex() for piece in pieces] if sidecar is None else hashlib.sha256(sidecar).hexdigest()
    return FileRecord(size=size, sha256=sha256, piece_bytes=piece_bytes, pieces=digests), sidecar
