"""What a marker says about a file, and what it may say.

A record is `{"size", "sha256"}`, of the whole content. A file longer than one piece also has `"piece_bytes"`, and the SHA-256 of each
consecutive piece of that length (the last one may be shorter) under `"pieces"`, so that whoever reads a part checks just that part:

    up to `INLINE` pieces     a list of hexadecimal digests
    more                      the digest of a sidecar that lies beside the file as `.<name>.pieces`: the 32 bytes of each digest, in order

So a manifest grows by 200 bytes with a file of any length, and a reader loads 32 bytes of digests per MiB of the files that it opens.

Invariant: names and records that come out of a marker are the store's data, written by who knows whom: they pass `inside` and
`check_record` before anything is done with them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from specs.redaction import SaysNoSecret

PIECE_BYTES = 2**20
"""1 MiB: a window of 4,096 tokens costs 0.6 ms of hashing when its piece is first touched, or a request of 1 MiB from elsewhere."""
WHOLE_BYTES = 64 * 2**20
"""A file that another program wrote may have no digests of pieces up to this length; its readers then hold all of it."""
INLINE = 8
DIGEST_BYTES = 32
HEX = re.compile("[0-9a-f]{64}")


class StoreError(SaysNoSecret, RuntimeError):
    """The store holds something else than it should, or refuses an operation. The message says what and what to do."""


class DamagedError(StoreError):
    """What was committed is not there any more, or not what was committed."""


class DamagedCheckpoint(DamagedError):
    """A committed checkpoint is not what was committed. `artifact`: whose it is, by its path in the store; `step`: which."""

    def __init__(self, message: str, artifact: str, step: int) -> None:
        super().__init__(message, artifact, step)  # all of them, so that it can be pickled
        self.artifact, self.step = artifact, step

    def __str__(self) -> str:
        return str(self.args[0])


def inside(name: Any, what: str) -> str:
    """A relative path that stays in its folder. StoreError for anything else; `what` names where it was found."""
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
        raise StoreError(f"{what} names {name!r}, which is not a path inside the store: a single name is expected")
    return str(name)


def check_record(record: Any, what: str) -> None:
    """DamagedError for what is not a record."""
    damaged = DamagedError(f"{what} is damaged: {record!r} is not the record of a file")
    if not isinstance(record, dict) or not _count(record.get("size")) or not _hex(record.get("sha256")):
        raise damaged
    if "pieces" in record:
        size, length, pieces = record["size"], record.get("piece_bytes"), record["pieces"]
        if not _count(length) or length == 0 or not (_hex(pieces) or (isinstance(pieces, list) and all(_hex(piece) for piece in pieces))):
            raise damaged
        if isinstance(pieces, list) and len(pieces) != -(-size // length):
            raise damaged


def check_files(files: Any, what: str) -> dict[str, dict[str, Any]]:
    """The files of a marker, name -> record. StoreError for a name that leads elsewhere, DamagedError for what is not a record."""
    if not isinstance(files, dict):
        raise DamagedError(f"{what} is damaged: its files are {files!r}")
    for name, record in files.items():
        inside(name, what)
        check_record(record, f"{what}, file '{name}',")
    return files


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _hex(value: Any) -> bool:
    return isinstance(value, str) and HEX.fullmatch(value) is not None


def sidecar_path(path: str) -> str:
    """Where the digests of the pieces of a file lie, if there are many."""
    place = PurePosixPath(path)
    return str(place.with_name(f".{place.name}.pieces"))


def piece_digests(data: bytes | memoryview, piece_bytes: int) -> list[bytes]:
    """SHA-256 of the consecutive pieces of `data`: 32 bytes each."""
    view = memoryview(data)
    return [hashlib.sha256(view[start : start + piece_bytes]).digest() for start in range(0, len(view), piece_bytes)]


def make_record(size: int, sha256: str, pieces: Sequence[bytes], piece_bytes: int) -> tuple[dict[str, Any], bytes | None]:
    """A record, and what its sidecar holds, if it needs one."""
    record: dict[str, Any] = {"size": size, "sha256": sha256}
    if len(pieces) <= 1:
        return record, None
    record["piece_bytes"] = piece_bytes
    if len(pieces) <= INLINE:
        return record | {"pieces": [piece.hex() for piece in pieces]}, None
    sidecar = b"".join(pieces)
    return record | {"pieces": hashlib.sha256(sidecar).hexdigest()}, sidecar
