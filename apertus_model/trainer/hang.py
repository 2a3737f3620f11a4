"""Ends a rank that hangs, and reports where it hung.

Every heartbeat restarts two timers. The first writes the stacks of all threads to a file of this rank; the
second, a few seconds later, ends the process, which leaves the other ranks time to write their stacks. Both
work without the interpreter: faulthandler's thread takes no lock, and the kernel sends SIGALRM, whose default
action ends a process even when it is stuck in a library.

Invariant: a process without a heartbeat for the stated time ends within `GRACE_SECONDS` more. The launcher
adds the files to the log.
"""

import faulthandler
import logging
import os
import signal
from pathlib import Path

logger = logging.getLogger(__name__)

HANG_SECONDS = 1800.0
# factor on the time for start-up, the first step, validation and waiting for storage
SLOW_FACTOR = 3.0
GRACE_SECONDS = 10.0


class HangWatch:
    """The timers of this process; made in its main thread. Stacks go to `stacks-<rank>.txt` in `folder`."""

    def __init__(self, folder: str | Path, rank: int, seconds: float | None = None) -> None:
        self.seconds = seconds or HANG_SECONDS
        self._file = os.open(
            Path(folder) / f"stacks-{rank}.txt",
            os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_TRUNC | os.O_CLOEXEC,
            0o600,
        )
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def heartbeat(self, factor: float = 1.0) -> None:
        """Sets the timers: the next heartbeat must come within `factor` times the stated time."""
        if os.fstat(self._file).st_size:
            logger.warning(
                "a step took longer than %g s, but did not hang; see launch.hang_timeout", self.seconds
            )
            os.ftruncate(self._file, 0)
        faulthandler.dump_traceback_later(self.seconds * factor, exit=False, file=self._file)
        signal.setitimer(signal.ITIMER_REAL, self.seconds * factor + GRACE_SECONDS)

    def close(self) -> None:
        """Stops the timers, when training is over."""
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.close(self._file)
