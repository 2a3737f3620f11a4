"""Small files on local disk, written atomically and durably.

Invariant: a name appears with its whole content, which is on disk by then, or not at all. `write_once` never replaces a file: a hard link
of a synced temporary file fails where the name exists. On a filesystem without hard links a claim file (O_EXCL) makes one writer at a time
look and rename; a claim that is older than `CLAIM_SECONDS`, by the filesystem's own clock, belongs to a writer that died.
"""

from __future__ import annotations

import errno
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
CLAIM_SECONDS = 30.0


def write_once(path: Path, data: bytes) -> bool:
    """False where the name existed with another content."""
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


def replace(path: Path, data: bytes) -> None:
    """Puts `data` in the place of what was there."""
    with _temporary(path, data) as temporary:
        os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


@contextmanager
def _temporary(path: Path, data: bytes) -> Iterator[Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".tmp-{uuid.uuid4().hex}"
    try:
        with open(temporary, "wb") as target:
            target.write(data)
            target.flush()
            os.fsync(target.fileno())
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _claim_and_rename(temporary: Path, path: Path) -> bool:
    claim = path.parent / f".tmp-claim-{path.name}"
    while True:
        try:
            os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            break
        except FileExistsError:
            if path.exists():
                return False
            try:
                os.utime(temporary)
                if temporary.stat().st_mtime - claim.stat().st_mtime > CLAIM_SECONDS:
                    claim.unlink()
            except FileNotFoundError:
                continue
            time.sleep(0.02)
    try:
        if path.exists():
            return False
        os.rename(temporary, path)
        return True
    finally:
        claim.unlink(missing_ok=True)
