"""The signals that end `apertus run`: Ctrl-C, SIGTERM, SIGHUP of a terminal that closes, and SIGUSR1.

They may be sent to every process of the run at once, and more than once: `timeout` sends two. The first
raises KeyboardInterrupt in the main thread; later ones do nothing, so that none cuts short what the first
began.

Invariant: the first is not lost. Python drops an exception that is raised in a callback, as of a weak
reference; `check` raises it again.
"""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from infra.liveness import STOP_SIGNALS, stop_signals_blocked

_heard: list[str] = []
_deferring = False


def listen() -> None:
    """Begins to listen, in the main thread. What was ignored from the start, by nohup say, stays so."""
    for number in STOP_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _hear)


def listen_again() -> None:
    """Takes back what a library has taken since `listen`. Does nothing where nobody listened."""
    if any(signal.getsignal(number) is _hear for number in STOP_SIGNALS):
        listen()


def check() -> None:
    """KeyboardInterrupt when one was heard."""
    if _heard:
        raise KeyboardInterrupt(_heard[0])


def ignore() -> None:
    """Until the process has ended: Python gives up a handler while it exits, and restores the default."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def blocked() -> Iterator[None]:
    """Processes that are started meanwhile inherit this mask, so none of these signals ends them. What comes
    meanwhile is raised afterwards: other threads may hear it, which the mask is not for."""
    global _deferring
    _deferring = True
    try:
        with stop_signals_blocked():
            yield
    finally:
        _deferring = False
    check()


def _hear(number: int, frame: Any) -> None:
    _without_terminal()
    if not _heard:
        _heard.append("Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name)
        if not _deferring:
            check()


def _without_terminal() -> None:
    """Output to a terminal that has closed goes nowhere from now on; it would fail."""
    for output in (1, 2):
        try:
            os.tcgetpgrp(output)
        except OSError as error:
            if error.errno == errno.EIO:
                os.dup2(os.open(os.devnull, os.O_WRONLY), output)
