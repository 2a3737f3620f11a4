"""Writes small files on local disk, atomically and durably.

Invariants:
- A name appears with its whole content, which is on disk by then unless `durable` is false, or not at all.
- `write_once` never replaces a file: a hard link of a synced temporary file fails where the name exists. On a
  filesystem without hard links, numbered claim files make one writer at a time look and rename. Each is
  created once (O_EXCL), and none is removed before the name is there; a claim found for `CLAIM_LOOKS` looks
  is of a writer that died, and the writer that creates the next claim continues.
- A sync that fails is an error at once. Linux marks the pages that it could not write as clean, so that a
  second sync succeeds without them (Rebello et al., "Can Applications Recover from fsync Failures?", 2020).
"""

import errno
import itertools
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.store.storage.retry import StorageError

NO_LINKS = {errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
CLAIM_LOOKS = 1500  # with pauses, some 30 s
CLAIM_PAUSE = 0.02


def write_once(path: Path, data: bytes) -> bool:
    """Writes a new file. False when the name exists already."""
    with _temporary(path, data) as temporary:
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            if not _claim_and_rename(temporary, path):
                return False
    sync_folder(path.parent)
    return True


def replace(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Writes a file in the place of the one that was there, if any."""
    with _temporary(path, data, durable=durable) as temporary:
        os.replace(temporary, path)
    if durable:
        sync_folder(path.parent)


def sync(number: int, path: Path) -> None:
    """Makes an open file's content durable. StorageError, never met with another try, if that fails."""
    try:
        os.fsync(number)
    except OSError as error:
        problem = f"{path} was written and could not be made durable ({error.strerror}). Run again"
        raise StorageError(error.errno, problem) from error


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable, if the filesystem can sync a folder. StorageError as in `sync`."""
    number = os.open(folder, os.O_RDONLY)
    try:
        sync(number, folder)
    except StorageError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(number)


@contextmanager
def _temporary(path: Path, data: bytes, *, durable: bool = True) -> Iterator[Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".tmp-{uuid.uuid4().hex}"
    try:
        with open(temporary, "wb") as target:
            target.write(data)
            target.flush()
            if durable:
                sync(target.fileno(), temporary)
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _claim_and_rename(temporary: Path, path: Path) -> bool:
    claims = []
    for number in itertools.count():
        claims.append(path.parent / f".tmp-claim-{number}-{path.name}")
        if _claim(claims[-1], path):
            break
        if path.exists():
            return False
    if free := not path.exists():
        os.rename(temporary, path)
    for claim in claims:
        claim.unlink(missing_ok=True)
    return free


def _claim(claim: Path, path: Path) -> bool:
    """Creates a claim; False when `path` is there, or the claim's writer has died."""
    for _ in range(CLAIM_LOOKS):
        try:
            os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            return True
        except FileExistsError:
            if path.exists():
                return False
        time.sleep(CLAIM_PAUSE)
    return False
