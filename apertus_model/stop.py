"""When a stage has to stop: a signal, or the death of the launcher.

The launcher holds the write end of the pipe that every process of a stage has as its standard input. When the launcher dies, however it
dies, the pipe ends, and a thread in each process notices. torchrun passes its standard input on to the ranks, so this reaches them too.

On a cluster two files take the place of the pipe: `APERTUS_STOP_FILE`, whose appearance asks for a stop, and `APERTUS_ALIVE_FILE`, which
changes while the launcher lives.

Invariant: a stage never outlives its launcher by more than the grace period, whatever it is doing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

GRACE_SECONDS = 90.0
POLL_SECONDS = 1.0
LOST_SECONDS = 600.0  # without a change of the launcher's file, until it counts as gone: shared folders are slow at times


class StopSignal:
    """`requested` turns true at the first SIGTERM, SIGINT or end of standard input, and stays so."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._cooperative = False
        self.reason = ""

    @property
    def requested(self) -> bool:
        return self._event.is_set()

    def request(self, reason: str) -> None:
        if not self._event.is_set():
            self.reason = reason
            self._event.set()

    def wait(self, seconds: float) -> bool:
        """Waits until it is requested, or for so long; whether it is."""
        return self._event.wait(seconds)

    @contextlib.contextmanager
    def cooperating(self) -> Iterator[None]:
        """In it the stage looks at `requested` and ends by itself, within the grace period, since it has something to end elsewhere."""
        before, self._cooperative = self._cooperative, True
        try:
            yield
        finally:
            self._cooperative = before

    def watch(self, *, cooperative: bool) -> None:
        """Begins to listen. `cooperative`: the stage looks at `requested` and ends by itself, within the grace period; otherwise its
        process group is killed at once, which costs no committed unit."""
        self._cooperative = cooperative
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        watch = self._watch_files if os.environ.get("APERTUS_STOP_FILE") else self._watch_stdin
        threading.Thread(target=watch, name="launcher-watch", daemon=True).start()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop(signal.Signals(number).name)

    def _watch_stdin(self) -> None:
        try:
            while os.read(0, 4096):
                continue
        except OSError:
            pass
        self._stop("the launcher is gone")

    def _watch_files(self) -> None:
        stop, alive = Path(os.environ["APERTUS_STOP_FILE"]), os.environ.get("APERTUS_ALIVE_FILE")
        last, changed = "", time.monotonic()
        while not stop.exists():
            time.sleep(POLL_SECONDS)
            if alive is None:
                continue
            with contextlib.suppress(OSError):
                if (sign := Path(alive).read_text()) != last:
                    last, changed = sign, time.monotonic()
            if time.monotonic() - changed > LOST_SECONDS:
                return self._stop("the launcher is gone")
        self._stop("the launcher asked for it, or the job is about to end")

    def _stop(self, reason: str) -> None:
        self.request(reason)
        if not self._cooperative:
            _kill_group()
        timer = threading.Timer(GRACE_SECONDS, _kill_group)
        timer.daemon = True
        timer.start()


def _kill_group() -> None:
    """Ends this process and its children, which share its process group."""
    sys.stdout.flush()
    os.killpg(os.getpgrp(), signal.SIGKILL)
