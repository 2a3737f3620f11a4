"""A filesystem that fails: at one call, or from it on, in one of the ways in which storage does.

`Faults.on(fs)` is a filesystem of the same class over the same files. Its calls are counted as the store
makes them, those on files that it has opened too; what one call does inside is part of that call. On a local
disk some calls of `os` are calls as well (`Faults.on_disk`).

Invariant: a fault does nothing to files that its call does not write.
"""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import botocore.exceptions
import fsspec
import pytest
from s3fs.errors import translate_boto_error

CALLS = (
    *(
        "exists",
        "info",
        "ls",
        "find",
        "isfile",
        "isdir",
        "open",
        "cat_file",
        "cat_ranges",
        "pipe_file",
        "put_file",
        "get_file",
        "cp_file",
    ),
    *("rm", "rm_file", "mv", "makedirs", "mkdir", "touch", "call_s3"),
)
DISK_CALLS = ("fsync", "link", "replace", "pwrite")
FILE_CALLS = ("read", "readinto", "write", "flush", "close")


def _answer(status: int, code: str) -> Callable[[], BaseException]:
    """What s3fs makes of an error response."""
    response: Any = {
        "Error": {"Code": code, "Message": "injected"},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    return lambda: translate_boto_error(botocore.exceptions.ClientError(response, "Injected"))


ERRORS: dict[str, Callable[[], BaseException]] = {
    "fails": lambda: OSError(errno.EIO, "injected"),
    "500": _answer(500, "InternalError"),
    "503": _answer(503, "SlowDown"),
    "unreachable": lambda: botocore.exceptions.EndpointConnectionError(endpoint_url="http://127.0.0.1:9"),
    # the client's own bound is over
    "stalls": lambda: botocore.exceptions.ReadTimeoutError(endpoint_url="http://127.0.0.1:9"),
    "refuses": lambda: PermissionError(errno.EACCES, "injected"),
    "full": lambda: OSError(errno.ENOSPC, "injected"),
}
NUMBERS = re.compile(r"[0-9a-f]{32}|[0-9a-f]{8}|\d+")
HANGS = "hangs"  # no answer until `let_go`: the caller's own bound has to end it
LOST = "answer is lost"  # the call has done its work, and fails
CUT = "truncates"  # a read gives half of the bytes; a write takes half of them, and fails
KINDS = (*ERRORS, LOST, CUT, HANGS)
LONGEST_SECONDS = 5.0  # of a call that hangs and that nothing bounds


class Faults:
    """Counts calls. `kind` happens at call number `at`, counted from 1, and at every later one if it is
    `lasting`."""

    def __init__(self, kind: str = "", at: int = 0, *, lasting: bool = False) -> None:
        self.kind, self.at, self.lasting = kind, at, lasting
        self.calls: list[str] = []
        # of each call its name and file, equal for the files of units, ranks, steps and attempts
        self.sites: list[tuple[str, str]] = []
        self._inside = threading.local()
        self._lock = threading.Lock()
        self._over = threading.Event()

    def let_go(self) -> None:
        """Calls that hang end."""
        self._over.set()

    def on(self, fs: Any) -> Any:
        """A filesystem like `fs` with these faults."""
        faulty = type(fs)(*fs.storage_args, **fs.storage_options, skip_instance_cache=True)
        for name in filter(partial(hasattr, faulty), CALLS):
            setattr(faulty, name, self._wrapped(name, getattr(faulty, name)))
        return faulty

    @contextmanager
    def on_disk(self) -> Iterator[None]:
        """In it, the calls of `os` by which files are written are calls too; `fsync` then does nothing
        else."""
        calls = {name: getattr(os, name) for name in DISK_CALLS}
        for name, call in calls.items():
            setattr(os, name, self._wrapped(name, call if name != "fsync" else lambda number: None))
        try:
            yield
        finally:
            for name, call in calls.items():
                setattr(os, name, call)

    def _wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            if getattr(self._inside, "call", False):
                return call(*arguments, **options)
            self._inside.call = True
            try:
                result = self._called(name, call, arguments, options)
            finally:
                self._inside.call = False
            return _File(result, self) if name == "open" else result

        return counted

    def _called(
        self, name: str, call: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        with self._lock:
            self.calls.append(name)
            number = len(self.calls)
            if not self.kind:
                path = next((NUMBERS.sub("#", item) for item in map(str, arguments[:1]) if "/" in item), "")
                # of an open file: the one before
                self.sites.append((name, path or (self.sites[-1][1] if self.sites else "")))
        if not (number == self.at or (self.lasting and number > self.at > 0)):
            return call(*arguments, **options)
        if self.kind in ERRORS:
            raise ERRORS[self.kind]()
        if self.kind == HANGS:
            self._over.wait(LONGEST_SECONDS)
            raise TimeoutError("injected")
        if self.kind == CUT and name in ("write", "pwrite"):
            place = name == "pwrite"
            call(*arguments[:place], arguments[place][: len(arguments[place]) // 2], *arguments[place + 1 :])
            raise ERRORS["fails"]()
        # an object that is put in one request is whole
        if self.kind == CUT and name != "close" and not name.startswith(("pipe", "put")):
            result = call(*arguments, **options)
            return result[: len(result) // 2] if isinstance(result, bytes) else result
        result = call(*arguments, **options)
        if self.kind == LOST:
            raise ERRORS["fails"]()
        return result


class _File:
    """An open file whose calls are counted."""

    def __init__(self, file: Any, faults: Faults) -> None:
        self._file = file
        for name in FILE_CALLS:
            if hasattr(file, name):
                setattr(self, name, faults._wrapped(name, getattr(file, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def like(fs: fsspec.AbstractFileSystem) -> fsspec.AbstractFileSystem:
    """Another filesystem over the same files, which knows nothing of what `fs` has listed."""
    return type(fs)(*fs.storage_args, **fs.storage_options, skip_instance_cache=True)


def flip_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last bit of every part of a file of the store on local disk is another one than was written."""
    pwrite = os.pwrite
    monkeypatch.setattr(
        os, "pwrite", lambda number, data, offset: pwrite(number, bytes([*data[:-1], data[-1] ^ 1]), offset)
    )
