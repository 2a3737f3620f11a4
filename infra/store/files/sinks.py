"""Contains the sinks of the parts of one file while it is written: local disk, an S3 server, or any other
filesystem.

Invariant: nothing is visible under the file's own name before the last step of `finish`, and that step makes
all of it visible. Every step can be repeated, so each is tried again by itself, except for syncs of local
disk, whose failure ends the file (`storage/local.py`).
"""

import io
import os
import tempfile
import uuid
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

from infra.store.scratch import scratch_root
from infra.store.storage.filesystem import Filesystem
from infra.store.storage.local import sync, sync_folder
from infra.store.storage.retry import StorageError

PART_BYTES = 16 * 2**20
PARTS_AHEAD = 8
ABORT_SECONDS = 10.0
PARTS_OF_A_SIZE = 1000
"""S3 allows 10,000 parts of 5 MiB to 5 GiB: the parts of each thousand are twice as long as those of the one
before, which suffices for 16 TiB."""


def part_length(before: int) -> int:
    """The length in bytes of the part of an upload that follows `before` others."""
    return PART_BYTES << (before // PARTS_OF_A_SIZE)


def parts_of(size: int) -> int:
    """The number of parts in which `size` bytes are uploaded; 0: shorter than a part, put in one go."""
    number = 0
    while size > 0 and (number or size >= PART_BYTES):
        size, number = size - part_length(number), number + 1
    return number


class Sink:
    """The destination of the parts of one file."""

    def __init__(self, store: Filesystem, path: str) -> None:
        self._store, self._path, self._full = store, path, store.full(path)
        self._what = f"writing '{path}'"

    def next_length(self) -> int:
        """The length in bytes of the next part, unless it is the last."""
        return PART_BYTES

    def put(self, part: bytes | bytearray) -> None: ...
    def finish(self, last: bytes) -> None:
        """Takes the last part (it may be empty) and makes the file visible."""

    def abort(self) -> None: ...


def sink_for(store: Filesystem, path: str) -> Sink:
    if store.is_local:
        return LocalSink(store, path)
    return MultipartSink(store, path) if hasattr(store.fs, "call_s3") else SpoolSink(store, path)


class LocalSink(Sink):
    """A temporary file beside the target, renamed at the end. Writes by position can be repeated."""

    def __init__(self, store: Filesystem, path: str) -> None:
        super().__init__(store, path)
        self._target = Path(self._full)
        self._temporary = self._target.parent / f".tmp-{uuid.uuid4().hex}"
        self._file: io.FileIO | None = None
        self._offset = 0

    def put(self, part: bytes | bytearray) -> None:
        self._store.call(self._what, lambda: self._write(part))
        self._offset += len(part)

    def _write(self, part: bytes | bytearray) -> None:
        if self._file is None:
            self._target.parent.mkdir(parents=True, exist_ok=True)
            self._file = io.FileIO(self._temporary, "wb")
        written, view = 0, memoryview(part)
        while written < len(part):
            written += os.pwrite(self._file.fileno(), view[written:], self._offset + written)

    def finish(self, last: bytes) -> None:
        self.put(last)
        file = self._file
        assert file is not None, "put opened it"
        self._store.call(self._what, lambda: sync(file.fileno(), self._target))
        file.close()
        self._store.call(self._what, lambda: os.replace(self._temporary, self._target))
        self._temporary = self._target  # which is what `abort` removes from here on
        self._store.call(self._what, lambda: sync_folder(self._target.parent))

    def abort(self) -> None:
        if self._file is not None:
            self._file.close()
        self._temporary.unlink(missing_ok=True)


class MultipartSink(Sink):
    """A multipart upload to S3, `PARTS_AHEAD` parts at a time; one PUT for less than a part."""

    def __init__(self, store: Filesystem, path: str) -> None:
        super().__init__(store, path)
        bucket, key, _ = store.fs.split_path(self._full)
        self._place = {"Bucket": bucket, "Key": key}
        self._upload = ""
        self._pool = ThreadPoolExecutor(PARTS_AHEAD, "upload")
        self._sent: list[Future[dict[str, Any]]] = []
        self._size = 0

    def next_length(self) -> int:
        return part_length(len(self._sent))

    def _s3(self, method: str, size: int = 0, **arguments: Any) -> dict[str, Any]:
        def ask() -> dict[str, Any]:
            answer: dict[str, Any] = self._store.fs.call_s3(method, **self._place, **arguments)
            return answer

        return self._store.call(f"{self._what} ({method})", ask, size=size)

    def put(self, part: bytes | bytearray) -> None:
        if not self._upload:
            self._upload = self._s3("create_multipart_upload")["UploadId"]
        if len(self._sent) >= PARTS_AHEAD:
            self._sent[-PARTS_AHEAD].result()
        request = {"UploadId": self._upload, "PartNumber": len(self._sent) + 1, "Body": part}
        self._sent.append(self._pool.submit(self._s3, "upload_part", len(part), **request))
        self._size += len(part)

    def finish(self, last: bytes) -> None:
        if not self._upload:
            put = partial(self._store.fs.pipe_file, self._full, last)
            self._store.call(self._what, put, size=len(last))
            self._pool.shutdown()
            return
        if last:
            self.put(last)
        tags = [sent.result()["ETag"] for sent in self._sent]
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, start=1)]
        request = {"UploadId": self._upload, "MultipartUpload": {"Parts": parts}}
        try:
            self._s3("complete_multipart_upload", self._size, **request)
        except FileNotFoundError:  # no such upload: an earlier try had completed it, and its answer was lost
            if self._store.size(self._path) != self._size:
                raise
        self._upload = ""
        self._pool.shutdown()

    def abort(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        wait(self._sent, timeout=ABORT_SECONDS)
        if self._upload:
            upload, self._upload = self._upload, ""
            try:
                self._store.fs.call_s3("abort_multipart_upload", **self._place, UploadId=upload)
            except Exception:  # the error that led here is raised already
                return


class SpoolSink(Sink):
    """A sink for any other filesystem: collects a file in a temporary one, and puts it in one call."""

    def __init__(self, store: Filesystem, path: str) -> None:
        super().__init__(store, path)
        self._spool: Any = None
        self._size = 0
        self._placing = False

    def put(self, part: bytes | bytearray) -> None:
        try:
            if self._spool is None:
                scratch_root().mkdir(parents=True, exist_ok=True)
                # lives until `_close`
                self._spool = tempfile.TemporaryFile(dir=scratch_root())  # noqa: SIM115
            self._spool.write(part)
        except OSError as error:
            problem = f"cannot buffer '{self._path}' in {scratch_root()} before it is stored: {error}"
            raise StorageError(error.errno, problem) from error
        self._size += len(part)

    def finish(self, last: bytes) -> None:
        if self._spool is not None:
            self.put(last)
            self._spool.flush()
        self._placing = True
        place = partial(self._store.in_folder, self._full, lambda: self._place(last))
        self._store.call(self._what, place, size=max(self._size, len(last)))
        self._close()

    def _place(self, last: bytes) -> None:
        if self._spool is None:
            self._store.fs.pipe_file(self._full, last)
        else:
            self._store.fs.put_file(f"/proc/self/fd/{self._spool.fileno()}", self._full)

    def abort(self) -> None:
        self._close()
        if self._placing:
            try:
                self._store.fs.rm_file(self._full)
            except Exception:  # most often there is no such file
                return

    def _close(self) -> None:
        if self._spool is not None:
            self._spool.close()


def write_whole(store: Filesystem, path: str, data: bytes) -> None:
    """Writes a file in one go, without a record: for sidecars."""
    sink = sink_for(store, path)
    try:
        sink.finish(data)
    except BaseException:
        sink.abort()
        raise
