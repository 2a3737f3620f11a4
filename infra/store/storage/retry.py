"""Handles storage that fails, stalls or answers wrongly.

Invariant: a call either gives its answer or ends in bounded time, with an error that says what was tried. An
error that another try may mend (network, server, time-out, throttling, wrong length) is met with another try
after an exponentially growing, randomly shortened pause (Brooker, "Exponential Backoff And Jitter", 2015); an
error about the file or the user (it does not exist, exists already, is not ours, the disk is full) is not.
"""

import errno
import logging
import os
import random
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from infra.store.records import StoreError
from specs.errors import StageError
from specs.redaction import MaskedError

logger = logging.getLogger(__name__)

T = TypeVar("T")

LONGEST = 86_400  # seconds
FINAL_ERRORS = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
AFTER_FULL = "Nothing that was committed is damaged; free space, or raise the quota, and run again"
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
FINAL_NUMBERS = {errno.EROFS, errno.ENAMETOOLONG, errno.ENOSYS, errno.ELOOP, errno.EMLINK, errno.EOPNOTSUPP}
# errors of botocore, aiohttp, httpx and azure.core that are no OSErrors; by name, since none is imported
NETWORK_ERRORS = {
    "HTTPClientError",
    "ConnectionError",
    "IncompleteReadError",
    "ResponseParserError",
    "ResponseStreamingError",
    "ClientError",
    "TransportError",
    "ServiceRequestError",
    "ServiceResponseError",
}


class StorageError(MaskedError, OSError):
    """Storage that failed in every try. The message says what failed and what to do."""


class WrongLength(OSError):
    """An answer has more or fewer bytes than were asked for."""


def is_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in FULL


def is_transient(error: BaseException) -> bool:
    """Whether another try may succeed."""
    if isinstance(error, (StorageError, StageError, *FINAL_ERRORS)) or is_full(error):
        return False
    if isinstance(error, OSError):
        return error.errno not in FINAL_NUMBERS
    return any(kind.__name__ in NETWORK_ERRORS for kind in type(error).__mro__)


def stated_seconds(variable: str, default: float, least: float = 1) -> float:
    """The seconds that an environment variable states, or `default`. StoreError for what is no number of at
    least `least` and at most `LONGEST`."""
    text = os.environ.get(variable) or str(default)
    if not re.fullmatch(r"\d{1,5}(\.\d+)?", text) or not least <= float(text) <= LONGEST:
        fix = f"set it to seconds between {least:g} and {LONGEST:,}"
        raise StoreError(f"{variable} is '{text}'. Fix: {fix}")
    return float(text)


def _sleep(seconds: float) -> None:
    time.sleep(seconds)


@dataclass(frozen=True)
class Retry:
    """The rules of trying a call again. In seconds: the first pause, the longest one, and how long one try
    may stall (`APERTUS_STORE_TIMEOUT`, 120 by default). Tests inject `sleep` and `chance`, in [0, 1)."""

    attempts: int = 7
    first: float = 0.5
    longest: float = 15.0
    stall: float = field(default_factory=lambda: stated_seconds("APERTUS_STORE_TIMEOUT", 120, 0.1))
    sleep: Callable[[float], None] = _sleep
    chance: Callable[[], float] = random.random

    def pause(self, number: int) -> float:
        """The seconds after try `number`, from 1: 1/2 to 1 of `first` x 2^(number - 1), or `longest`."""
        return min(self.longest, self.first * 2 ** (number - 1)) * (0.5 + 0.5 * self.chance())

    def call(self, what: str, function: Callable[[], T], *, guard: float | None = None) -> T:
        """Calls `function` and returns its result. StorageError if all tries fail or the disk is full; errors
        that no other try can mend are passed on. `guard`: seconds beyond `stall` after which a try counts as
        failed, its thread left behind; None for a call that cannot be left, such as a write on local disk."""
        for number in range(1, self.attempts + 1):
            try:
                if guard is None:
                    return function()
                return _within(guard + self.stall, function)
            except Exception as error:
                if isinstance(error, OSError) and is_full(error):
                    full = f"there is no space left: {what} ({error.strerror})"
                    raise StorageError(error.errno, f"{full}. {AFTER_FULL}") from error
                if not is_transient(error):
                    raise
                text = f"{type(error).__name__}: {error}"
                if number == self.attempts:
                    failed = f"the storage failed {number} times: {what}; the last time with {text}"
                    raise StorageError(f"{failed}. Run again when it works") from error
                pause = self.pause(number)
                logger.warning(
                    "%s failed, try %d of %d (%s); again in %.1f s", what, number, self.attempts, text, pause
                )
                self.sleep(pause)
        raise AssertionError("at least one attempt is made")


def _within(seconds: float, function: Callable[[], T]) -> T:
    """Calls `function` in a thread of its own and returns its result; TimeoutError when that takes longer."""
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="storage call", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer in {seconds:g} s")
    return results[0]
