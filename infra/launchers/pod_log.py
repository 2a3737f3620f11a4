"""Follows the log of a pod while an attempt runs, through kubectl, which ends when its connection does.

Invariants: a line is passed on once, however often kubectl is started again. kubectl is asked for the lines
since the second of the last one, which is as exact as the cluster is, and those of that second that were read
before are left out. An incomplete report is a line like any other.
"""

from __future__ import annotations

import re
import subprocess
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from pydantic import TypeAdapter

from infra.launchers.local import TAIL_LINES
from specs.job import REPORT, Failure, ProgressRow
from specs.redaction import redacted

REPORTS: TypeAdapter[ProgressRow | Failure] = TypeAdapter(ProgressRow | Failure)
STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)\S* ")


class LogReader:
    """A reader that takes the reports out of a log: progress rows go to `on_progress`, the error to `error`,
    all other lines to `on_line`."""

    def __init__(
        self, on_line: Callable[[str], None], on_progress: Callable[[ProgressRow], None], log: Path
    ) -> None:
        self._on_line = on_line
        self._on_progress = on_progress
        self._log = log
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.error: Failure | None = None

    def line(self, text: str) -> None:
        report = _report(text)
        if report is None:
            text = redacted(text)
            with open(self._log, "a", encoding="utf-8") as log:
                log.write(text + "\n")
            self.tail.append(text)
            self._on_line(text)
        elif isinstance(report, Failure):
            self.error = report
        else:
            self._on_progress(report)


def _report(text: str) -> ProgressRow | Failure | None:
    """The report in a line; None for a line that is no report, or a torn one."""
    if not text.startswith(REPORT):
        return None
    try:
        return REPORTS.validate_json(text.removeprefix(REPORT))
    except ValueError:
        return None


class Follower:
    """A follower of the log of one pod, from `begin` to `end`. `command`: `kubectl logs`."""

    def __init__(self, command: list[str], reader: LogReader, pause: float) -> None:
        self._command = command
        self._reader = reader
        self._pause = pause
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._kubectl: subprocess.Popen[str] | None = None
        self._stamp = ""  # the time stamp of the last line
        self._seen: set[str] = set()  # the lines read of that second

    def begin(self, pod: str) -> None:
        """Starts to follow the log of a pod, unless it is followed already."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._follow, args=(pod,), daemon=True)
            self._thread.start()

    def end(self, seconds: float) -> None:
        """Reads the rest of the log, for `seconds` at most. Nothing is called back afterwards."""
        self._over.set()
        if self._thread is None:
            return
        self._thread.join(seconds)
        while self._thread.is_alive():  # a kubectl that waits for a node that is gone
            if self._kubectl is not None:
                self._kubectl.kill()
            self._thread.join(0.1)

    def _follow(self, pod: str) -> None:
        while True:
            last = self._over.is_set()
            since = [f"--since-time={self._stamp}"] if self._stamp else []
            words = [*self._command, "--follow", "--timestamps", *since, pod]
            with subprocess.Popen(
                words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, errors="replace"
            ) as self._kubectl:
                assert self._kubectl.stdout is not None
                for line in self._kubectl.stdout:
                    if last or line.endswith("\n"):  # a line that was cut off comes again
                        self._line(line.rstrip("\n"))
            if last:
                return
            self._over.wait(self._pause)

    def _line(self, line: str) -> None:
        stamp = STAMP.match(line)
        if stamp is None:
            self._reader.line(line)
        elif line not in self._seen:
            if not self._stamp.startswith(stamp[1]):
                self._seen = set()
            self._stamp = stamp[0].rstrip()
            self._seen.add(line)
            self._reader.line(line[stamp.end() :])
