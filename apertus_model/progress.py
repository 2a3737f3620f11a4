"""Reports the progress of a running stage, in a JSONL file that the launcher follows.

Invariant: reporting is cheap and never fails a stage; it writes at most a few rows a second, always the first
and the last.
"""

import time
from pathlib import Path

from specs.job import ProgressRow


class Progress:
    """A reporter: `update` reports progress, `log` a line of text for people."""

    def __init__(self, path: str | Path | None, interval: float = 0.2) -> None:
        # lives as long as the process
        self._file = open(path, "a", buffering=1) if path else None  # noqa: SIM115
        self._interval = interval
        self._last = 0.0

    def update(self, done: float, total: float, unit: str, **metrics: float) -> None:
        now = time.monotonic()
        if done < total and now - self._last < self._interval:
            return
        self._last = now
        if self._file is not None:
            row = ProgressRow(done=done, total=total, unit=unit, metrics=metrics)
            self._file.write(row.model_dump_json() + "\n")

    def log(self, text: str) -> None:
        print(text, flush=True)


class UnitProgress:
    """A reporter of the finished units of a stage, and of workers that a cluster runs or has queued."""

    def __init__(self, progress: Progress, units: int, pending: int) -> None:
        self._progress = progress
        self._units = units
        self._done = units - pending
        progress.update(self._done, units, "units")

    def one_more(self) -> None:
        self._done += 1
        self._progress.update(self._done, self._units, "units")

    def waiting(self, running: int, queued: int) -> None:
        self._progress.update(self._done, self._units, "units", running=running, queued=queued)
