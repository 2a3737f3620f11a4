"""Temporary folders. The process that makes a folder removes it; if that process was killed, the next process
that makes one does.

Invariant: each folder has a file that the processes which use it keep locked; the kernel drops the lock of a
process when it ends, for whatever reason. The name of the file holds the id of the machine's boot: a folder
that another machine has made on a shared file system is left alone, as its locks may not be visible here.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from infra.liveness import machine
from specs.errors import StageError

PREFIX = "apertus-"
LOCKED = ".locked-"
LOCK = f"{LOCKED}{machine()[0]}"


def scratch_root(folder: str | None = None) -> Path:
    """The folder of temporary folders: `folder`, `APERTUS_SCRATCH` or the system's."""
    return Path(folder or os.environ.get("APERTUS_SCRATCH") or tempfile.gettempdir())


@contextlib.contextmanager
def temporary_folder(name: str, root: str | None = None) -> Iterator[Path]:
    """A new folder `apertus-<name>-...` in `scratch_root(root)`, removed afterwards, or a StageError."""
    parent = scratch_root(root)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(parent)
        folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{name}-", dir=parent))
    except OSError as error:
        fix = "set APERTUS_SCRATCH, or scratch in the profile, to a folder in which you can write"
        message = f"no scratch folder can be created in '{parent}': {error.strerror}. Fix: {fix}"
        raise StageError(message) from error
    try:
        with open(folder / ".new", "w") as lock:
            with contextlib.suppress(OSError):  # a file system without locks: the folder is never abandoned
                fcntl.flock(lock, fcntl.LOCK_SH)
                os.rename(lock.name, folder / LOCK)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def keep_folder(folder: str) -> None:
    """Keeps a temporary folder as long as this process runs, even if its maker is killed before."""
    for file in Path(folder).glob(f"{LOCKED}*"):
        with contextlib.suppress(OSError):
            fcntl.flock(os.open(file, os.O_RDWR), fcntl.LOCK_SH | fcntl.LOCK_NB)


def _remove_abandoned(parent: Path) -> None:
    """Removes this user's folders that no process has locked."""
    for file in parent.glob(f"{PREFIX}*/{LOCK}"):
        with contextlib.suppress(OSError):
            if file.parent.lstat().st_uid != os.getuid():
                continue
            with open(os.open(file, os.O_RDWR | os.O_NOFOLLOW)) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(file.parent, ignore_errors=True)
