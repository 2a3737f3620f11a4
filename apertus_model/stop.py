"""Tells a stage when it must stop: on a signal, when the launcher dies, or before its job ends.

The launcher holds the write end of the pipe that every process of a stage has as its standard input. When the
launcher dies for any reason, the pipe closes, and a thread in each process notices. torchrun passes its
standard input to the ranks, so this reaches them too.

On a cluster two files replace the pipe: `APERTUS_STOP_FILE`, whose appearance requests a stop, and
`APERTUS_ALIVE_FILE`, which changes while the launcher lives.

The launcher states in `APERTUS_STOP_SECONDS` how long a stage has to end, and waits a little longer.

Invariants: a stage never outlives its launcher by more than the grace period; a stage without anything to
commit ends with it. Separate threads listen to signals and the pipe: Python runs its handlers in the main
thread, which may be inside a library, waiting for a peer that is gone.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from infra.liveness import LOST_SECONDS, STOP_SIGNALS, FileSilence, wait_for_end
from specs.errors import StageError

GRACE_SECONDS = 90.0  # without `APERTUS_STOP_SECONDS`
POLL_SECONDS = 1.0
# environment variables with the unix time; the first that is set counts
JOB_ENDS = ("APERTUS_JOB_END", "SLURM_JOB_END_TIME")


def job_end(environment: Mapping[str, str] = os.environ) -> float | None:
    """The unix time at which the job of this process ends; None if the environment does not state it.
    StageError when the variable is not a time."""
    for name in JOB_ENDS:
        if text := environment.get(name):
            try:
                return float(text)
            except ValueError:
                fix = "set it to the output of `date +%s -d '...'`"
                raise StageError(f"{name} is '{text}', which is not a unix time; {fix}") from None
    return None


class StopSignal:
    """A request to stop: `requested` becomes true at the first of `STOP_SIGNALS` or at the end of standard
    input, and stays true. `orphaned`: standard input ended, so the launcher need not be told."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._grace = float(os.environ.get("APERTUS_STOP_SECONDS", GRACE_SECONDS))
        self._cooperative = False
        self._tell: Callable[[str], None] = lambda reason: None
        self.reason = ""
        self.orphaned = False

    @property
    def requested(self) -> bool:
        return self._event.is_set()

    def request(self, reason: str) -> None:
        if not self._event.is_set():
            self.reason = reason
            self._event.set()

    def wait(self, seconds: float) -> bool:
        """Waits for a request for at most `seconds`; returns whether there is one."""
        return self._event.wait(seconds)

    def before_end(self, seconds: float) -> None:
        """Requests a stop `seconds` before the job ends, if its end is known."""
        end = job_end()
        if end is not None:
            _later(end - seconds - time.time(), self.request, f"the job ends in {seconds:g} s")

    @contextlib.contextmanager
    def cooperating(self) -> Iterator[None]:
        """A context in which the stage checks `requested` and ends itself, since it must end other jobs."""
        before, self._cooperative = self._cooperative, True
        try:
            yield
        finally:
            self._cooperative = before

    def cooperate(self) -> None:
        """From now on the stage checks `requested` and ends itself in time, since it may commit results."""
        self._cooperative = True

    def watch(self, *, cooperative: bool, tell: Callable[[str], None] = lambda reason: None) -> None:
        """Begins to listen; called in the main thread. `cooperative`: the stage checks `requested` and ends
        itself within the grace period; otherwise its process group is killed at once, which loses no
        committed unit. `tell`: is called with the reason before the kill, unless the launcher knows it."""
        self._cooperative, self._tell = cooperative, tell
        heard, woken = os.pipe()
        os.set_blocking(woken, False)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=_forget)
        for number in STOP_SIGNALS:
            signal.signal(number, lambda number, frame: None)
        watch = self._watch_files if os.environ.get("APERTUS_STOP_FILE") else self._watch_stdin
        threading.Thread(target=watch, name="launcher-watch", daemon=True).start()
        threading.Thread(target=self._watch_signals, args=(heard,), name="signal-watch", daemon=True).start()

    def _watch_signals(self, heard: int) -> None:
        while True:
            (number,) = os.read(heard, 1)
            if number in STOP_SIGNALS:
                by_torchrun = number == signal.SIGTERM and "TORCHELASTIC_RUN_ID" in os.environ
                self._stop(signal.Signals(number).name, report=not by_torchrun)

    def _watch_stdin(self) -> None:
        wait_for_end()
        self.orphaned = not self.requested
        self._stop("the launcher is gone", report=False)

    def _watch_files(self) -> None:
        stop, alive = Path(os.environ["APERTUS_STOP_FILE"]), os.environ.get("APERTUS_ALIVE_FILE")
        launcher = FileSilence(Path(alive)) if alive else None
        while not stop.exists():
            time.sleep(POLL_SECONDS)
            if launcher is not None and launcher.seconds() > LOST_SECONDS:
                return self._stop("the launcher is gone")
        self._stop("the launcher asked for it, or the job is about to end")

    def _stop(self, reason: str, *, report: bool = True) -> None:
        """Requests a stop, and kills the process group at once or after the grace period. `report`: whether
        to tell the launcher. Not for SIGTERM to a rank: torchrun also sends it when a peer has died, and
        reports its signals."""
        self.request(reason)
        if not self._cooperative:
            if report:
                self._tell(reason)
            kill_group()
        _later(self._grace, kill_group)


def _later(seconds: float, function: Callable[..., object], *arguments: str) -> None:
    """Calls a function after some seconds, if the process still lives."""
    timer = threading.Timer(max(0.0, seconds), function, arguments)
    timer.daemon = True
    timer.start()


def _forget() -> None:
    """Resets the state in a forked child, whose signals do not concern this process."""
    signal.set_wakeup_fd(-1)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def kill_group() -> None:
    """Ends this process and its children, which share its process group."""
    sys.stdout.flush()
    os.killpg(os.getpgrp(), signal.SIGKILL)
