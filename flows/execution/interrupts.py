"""The signals that end `apertus run`: Ctrl-C, SIGTERM, SIGHUP of a terminal that closes, and SIGUSR1.

They may be sent to every process of the run at once, and more than once: `timeout` sends two. The first
raises KeyboardInterrupt in the main thread; later ones do nothing, so that the shutdown is not cut short.

Invariant: the first signal is not lost: `check` raises what Python drops in a callback of a weak reference.
"""

import errno
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from infra.liveness import STOP_SIGNALS, stop_signals_blocked

CTRL_C = "Ctrl-C"
_heard: list[str] = []
_deferring = False


def listen() -> None:
    """Installs the handlers, in the main thread. A signal ignored at the start (nohup) stays ignored."""
    for number in STOP_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _on_signal)


def listen_again() -> None:
    """Reinstalls handlers that a library has replaced since `listen`. Does nothing without `listen`."""
    if any(signal.getsignal(number) is _on_signal for number in STOP_SIGNALS):
        listen()


def check() -> None:
    """Raises KeyboardInterrupt when a signal has arrived."""
    if _heard:
        raise KeyboardInterrupt(_heard[0])


def ignore() -> None:
    """Ignores the signals until the process ends: Python restores the default handlers while it exits."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def blocked() -> Iterator[None]:
    """Blocks the signals for processes that are started meanwhile, which inherit the mask. A signal that
    arrives meanwhile is raised afterwards, as another thread may receive it."""
    global _deferring
    _deferring = True
    try:
        with stop_signals_blocked():
            yield
    finally:
        _deferring = False
    check()


def _on_signal(number: int, frame: Any) -> None:
    _without_terminal()
    if not _heard:
        _heard.append(CTRL_C if number == signal.SIGINT else signal.Signals(number).name)
        if not _deferring:
            check()


def _without_terminal() -> None:
    """Discards further output to a closed terminal, where it would fail."""
    for output in (1, 2):
        try:
            os.tcgetpgrp(output)
        except OSError as error:
            if error.errno == errno.EIO:
                os.dup2(os.open(os.devnull, os.O_WRONLY), output)
