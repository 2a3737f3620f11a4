"""Observes whether another process still lives, by a pipe, a file or its process id, and defines the signals
that end a run.

- A pipe: the observer reads a pipe whose write end only the observed process holds (`wait_for_end`).
- A file or an object of storage: the observed process rewrites it again and again (`Beats`); the observer
  checks whether it changes (`Silence`).
- A process of this machine: its process id and its start time (`is_running`).

Invariant: nobody compares clocks of two machines; an observer measures on its own monotonic clock how long a
heartbeat did not change.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that end a run. They may be sent to all processes of the run at once."""
BEAT_SECONDS = 5.0  # between two heartbeats in a file
# without a heartbeat until its writer counts as gone: shared folders are slow at times
LOST_SECONDS = 600.0
ROOT = Path(__file__).resolve().parents[1]
_guards: list[subprocess.Popen[bytes]] = []  # keeps their pipes open until this process ends
LONGEST_GAP = 60.0  # between two looks at a file


def python_path() -> str:
    """PYTHONPATH of a process that has to import this package."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))


@contextlib.contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Blocks `STOP_SIGNALS` for this thread, and for good in the processes that it starts meanwhile."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def wait_for_end(pipe: int = 0) -> None:
    """Blocks until no process holds the write end of a pipe (standard input by default)."""
    with contextlib.suppress(OSError):
        while os.read(pipe, 4096):
            continue


def start_guard(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Starts a process whose standard input ends when this process ends, for whatever reason."""
    nowhere = subprocess.DEVNULL  # whoever reads what this process prints waits for all that hold its output
    with stop_signals_blocked():
        guard = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, start_new_session=True
        )
    _guards.append(guard)
    return guard


class Beats:
    """A thread that calls `beat` every `seconds` inside the block; `beat` handles its own errors."""

    def __init__(self, beat: Callable[[], object], seconds: float, name: str) -> None:
        self._beat = beat
        self._seconds = seconds
        self._over = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=name, daemon=True)

    def __enter__(self) -> Beats:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._wake.set()
        self._thread.join()

    def now(self) -> None:
        """Makes the next beat come at once."""
        self._wake.set()

    def _keep(self) -> None:
        while True:
            self._wake.wait(self._seconds)
            self._wake.clear()
            if self._over:
                return
            self._beat()


@contextlib.contextmanager
def beating(write: Callable[[bytes], object], seconds: float, name: str) -> Iterator[None]:
    """A context in which a thread writes another sign of life every `seconds`."""
    counts = itertools.count()

    def beat() -> None:
        with contextlib.suppress(Exception):  # storage that does not answer may answer the next beat
            write(str(next(counts)).encode())

    beat()
    with Beats(beat, seconds, name):
        yield


def beats_in_file(file: Path) -> contextlib.AbstractContextManager[None]:
    """A context in which a thread rewrites a file every `BEAT_SECONDS`: a sign that this process lives."""
    return beating(file.write_bytes, BEAT_SECONDS, f"beats in {file.name}")


class Silence:
    """The time for which a heartbeat has not changed. Looks further apart than `longest_gap` seconds count as
    `longest_gap` apart: an observer that slept does not take its absence for that of the observed."""

    def __init__(self, longest_gap: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._longest_gap = longest_gap
        self._clock = clock
        self._sign: object = self  # no sign is equal to it
        self._looked = self._seconds = 0.0

    def after(self, sign: object) -> float:
        """Seconds during which successive looks have seen this sign."""
        now, before = self._clock(), self._seconds
        self._seconds = before + min(now - self._looked, self._longest_gap) if sign == self._sign else 0.0
        self._sign, self._looked = sign, now
        return self._seconds


class FileSilence:
    """The `Silence` of a process with `beats_in_file`. An unreadable file counts as unchanged."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._last: str | None = None
        self._silence = Silence(LONGEST_GAP)

    def seconds(self) -> float:
        """Reads the file, and returns the seconds for which it has not changed."""
        with contextlib.suppress(OSError):
            self._last = self._file.read_text()
        return self._silence.after(self._last)


# Processes of this machine; without /proc, nothing is known about them


def machine() -> tuple[str, str]:
    """The machine's boot and the namespace of process ids: equal for processes that see each other's."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")
    except OSError:
        return "", ""


def started(pid: int) -> int | None:
    """The start of a process in clock ticks since boot; None if it is gone, or only to be reaped."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if words[0] in "ZX" else int(words[19])


def is_running(pid: int, start: int | None) -> bool:
    """Whether the process `pid` that was started at `start` still runs: ids are reused."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's process, which may be hidden from this user
        return True
    return started(pid) == start


def reads_pipe(inode: int) -> bool:
    """Whether a process has this pipe as its standard input."""
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and os.readlink(folder / "fd" / "0") == f"pipe:[{inode}]":
                return True
        except OSError:
            continue
    return False
