"""Decides who works at a part: of several runs that want the same part, one works and the others wait.

Below the folder of the artifact:

    leases/<n>.json             the claim of generation n, written once: who holds it, on which machine
    leases/<n>-<attempt>.beat   the holder's own file, which it alone rewrites: a growing counter, and whether
                                it has released

Invariants: no data depend on a lease; attempts never share a path and markers are written once, whoever holds
what. A lease saves double work, and it fences: an attempt that lost it commits, prunes and withdraws nothing
any more. Nobody compares wall clocks: a lease is over when its counter has stood still for `seconds` on the
observer's own monotonic clock. No thread waits for a lease while it holds another, so there are no deadlocks.
The next holder removes the files of a lease that is over.

A claim is believed when it is the newest and names its writer when it is read again, after a pause if the
storage is remote: exclusive writes cannot be relied on everywhere. If two claims were believed nevertheless,
the writer that the claim does not name finds out at a beat.

Calls of storage: a look is a listing and at most two small reads; a claim a write, a listing, a read, and two
removals after another holder; a beat a listing and a write; a check a listing; a release a write.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from pydantic import Field, ValidationError

from infra import liveness
from infra.liveness import Beats, Silence
from infra.store.documents import to_json
from infra.store.storage.retry import LONGEST, stated_seconds
from infra.store.store import Store, StoreError
from specs.base import Strict
from specs.foreign import Foreign, ForeignError, checked, parse_json

logger = logging.getLogger(__name__)

BEATS = 4  # in the time of a lease
NAME = r"^[A-Za-z0-9][\w.-]*$"
_FILE = re.compile(r"(\d{8})(?:\.json|-([A-Za-z0-9][\w.-]*)\.beat)")


class LeaseLost(StoreError):
    """Another attempt holds the lease now. The message names it."""


@dataclass(frozen=True)
class Timing:
    """Times in seconds, and the clock that measures them. `seconds`: without a beat until the holder counts
    as dead; `look`: between two looks of an observer; `settle`: between a claim on remote storage and reading
    it again."""

    seconds: float = field(default_factory=lambda: stated_seconds("APERTUS_LEASE_SECONDS", 60))
    look: float = 3.0
    settle: float = 1.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


class Holder(Strict):
    """The holder by its claim: the launcher's process on its machine; `since` is for people."""

    attempt: str = Field(pattern=NAME)
    host: str = Field(pattern=r"^[\w.:-]*$")
    boot: str
    namespace: str
    pid: int
    started: int | None
    seconds: float = Field(gt=0, le=LONGEST)
    since: str = Field(pattern=r"^[0-9TZ:.+-]*$")

    @classmethod
    def here(cls, attempt: str, seconds: float) -> Holder:
        """This process as the holder."""
        boot, namespace = liveness.machine()
        return cls(
            attempt=attempt,
            host=re.sub(r"[^\w.:-]", "-", socket.gethostname()),
            boot=boot,
            namespace=namespace,
            pid=os.getpid(),
            started=liveness.started(os.getpid()),
            seconds=seconds,
            since=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def __str__(self) -> str:
        return f"attempt {self.attempt} on {self.host} (process {self.pid}) since {self.since}"

    @property
    def on_this_machine(self) -> bool:
        """Whether the holder's process can be looked up from this one."""
        return bool(self.boot) and (self.boot, self.namespace) == liveness.machine()

    @property
    def gone(self) -> bool:
        """Whether the holder ran on this machine and has ended. Of other machines nothing is known."""
        return self.on_this_machine and not liveness.is_running(self.pid, self.started)


class Beat(Foreign):
    """The content of the holder's own file."""

    count: int = 0  # grows from beat to beat
    released: bool = False
    pipe: int | None = None  # inode of the standard input of the stage's processes

    @classmethod
    def read(cls, data: bytes) -> Beat:
        """The beat in `data`; the default if that is damaged or empty, since only its changes matter."""
        try:
            return checked(cls, parse_json(data))
        except ForeignError:
            return cls()


@dataclass(frozen=True)
class Seen:
    """The newest generation (0: there was none), its holder, and whether the part is free to be claimed.
    `why`, for people: why it is free although nobody released it, or what is waited for."""

    generation: int
    holder: Holder | None
    free: bool
    why: str = ""


class Leases:
    """The leases of one part, as one observer sees them over time. For one thread."""

    def __init__(self, store: Store, path: str, timing: Timing | None = None) -> None:
        self.store = store
        self.path = path
        self.timing = timing or Timing()
        self._silence = Silence(2 * self.timing.look, self.timing.clock)

    def look(self) -> Seen:
        """The present state. StoreError for a claim that is damaged."""
        while True:
            names = self.store.names(_folder(self.path))
            generation = _newest(names)
            if generation == 0:
                return Seen(0, None, True)
            holder = _holder(self.store, self.path, generation)
            if holder is not None:
                break
            self.timing.sleep(self.timing.settle)  # the next holder removed it, or the listing is old
        name = _beat_file(generation, holder.attempt)
        beat = (self.store.read_if_there(f"{_folder(self.path)}/{name}") if name in names else None) or b""
        expired = self._silence.after((generation, holder.attempt, beat)) > holder.seconds
        state = Beat.read(beat)
        if state.released:
            return Seen(generation, holder, True)
        if expired:
            return Seen(generation, holder, True, f"no heartbeat for {holder.seconds:g} s")
        if holder.gone:
            if state.pipe is not None and liveness.reads_pipe(state.pipe):
                return Seen(generation, holder, False, "its stage is still ending")
            return Seen(generation, holder, True, "its process is gone")
        return Seen(generation, holder, False)

    def claim(self, attempt: str, seen: Seen) -> Lease | None:
        """Takes the lease that a look found free; None when another attempt was quicker."""
        assert seen.free, "a held lease is not claimed"
        holder = Holder.here(attempt, self.timing.seconds)
        lease = Lease(self.store, self.path, seen.generation + 1, holder, self.timing)
        self.store.write_once(_claim_file(self.path, lease.generation), to_json(holder))
        try:
            if not self.store.is_local:
                self.timing.sleep(self.timing.settle)
            names = self.store.names(_folder(self.path))
            if _newest(names) > lease.generation:
                return None
            if _holder(self.store, self.path, lease.generation) != holder:
                return None
            for name in names:
                if _generation(name) < lease.generation:
                    self.store.remove(f"{_folder(self.path)}/{name}")
        except BaseException:
            lease.release()
            raise
        return lease


class Lease:
    """A lease that was claimed. Its `with` block beats in a thread, and releases it at the end."""

    def __init__(self, store: Store, path: str, generation: int, holder: Holder, timing: Timing) -> None:
        self.store = store
        self.path = path
        self.generation = generation
        self.holder = holder
        self.timing = timing
        self.lost = ""
        self._pipe: int | None = None
        self._count = 0
        self._on_lost: Callable[[str], None] = lambda reason: None
        self._lock = threading.Lock()
        self._beats = Beats(self._try_beat, timing.seconds / BEATS, f"lease-{holder.attempt}")

    def __enter__(self) -> Lease:
        self._beats.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._beats.__exit__()
        self.release()

    def when_lost(self, call: Callable[[str], None]) -> None:
        """Calls `call(reason)` as soon as the lease is known to be lost, from another thread or at once."""
        with self._lock:
            self._on_lost = call
            lost = self.lost
        if lost:
            call(lost)

    def stage_started(self, pipe: int) -> None:
        """Makes the beat name, from now on, the pipe (by its inode) that the stage's processes have as
        standard input. An attempt that takes over on this machine gives them the time to end."""
        self._pipe = pipe
        self._beats.now()

    def check(self) -> None:
        """Raises LeaseLost when the lease is another attempt's."""
        try:
            require(self.store, self.path, self.generation, self.holder.attempt)
        except LeaseLost as error:
            with self._lock:
                self.lost, call = str(error), self._on_lost
            call(str(error))
            raise

    def beat(self) -> None:
        """Says that the holder lives. LeaseLost when it is not the holder any more."""
        self.check()
        self._write(released=False)

    def release(self) -> None:
        """Lets the next attempt have the lease. If storage refuses, it ends by its time."""
        if self.lost:
            return
        try:
            self._write(released=True)
        except Exception as error:
            logger.warning("the lease of %s could not be released: %s", self.path, error)

    def _write(self, *, released: bool) -> None:
        self._count += 1
        beat = Beat(count=self._count, released=released, pipe=self._pipe)
        name = _beat_file(self.generation, self.holder.attempt)
        self.store.overwrite(f"{_folder(self.path)}/{name}", to_json(beat))

    def _try_beat(self) -> None:
        if self.lost:
            return
        try:
            self.beat()
        except LeaseLost:
            pass  # `check` has reported it
        except Exception as error:  # the storage failed; the next beat may reach it
            logger.warning("no beat for the lease of %s: %s", self.path, error)


def require(store: Store, path: str, generation: int, attempt: str) -> None:
    """Raises LeaseLost unless the lease of the part is that attempt's. Takes one listing."""
    names = store.names(_folder(path))
    newest = _newest(names)
    others = any(
        _generation(name) == generation and name != _beat_file(generation, attempt)
        for name in names
        if name.endswith(".beat")
    )
    if newest < generation or (newest == generation and not others):
        return
    holder = _holder(store, path, newest)
    if newest > generation or (holder is not None and holder.attempt != attempt):
        raise LeaseLost(f"the lease was taken over by {holder or 'another attempt'}")


def holder_of(store: Store, path: str) -> Holder | None:
    """Who seems to work at a part, by one look, which cannot tell if another machine's process lives."""
    try:
        seen = Leases(store, path).look()
    except StoreError:
        return None
    return None if seen.free else seen.holder


# Files


def _folder(path: str) -> str:
    return f"{path}/leases"


def _claim_file(path: str, generation: int) -> str:
    return f"{_folder(path)}/{generation:08d}.json"


def _beat_file(generation: int, attempt: str) -> str:
    return f"{generation:08d}-{attempt}.beat"


def _generation(name: str) -> int:
    """The generation of a file in the folder; 0 for a file that does not belong there."""
    match = _FILE.fullmatch(name)
    return int(match[1]) if match else 0


def _newest(names: Iterable[str]) -> int:
    return max((_generation(name) for name in names if name.endswith(".json")), default=0)


def _holder(store: Store, path: str, generation: int) -> Holder | None:
    """The holder that a claim states; None when there is no such claim."""
    file = _claim_file(path, generation)
    data = store.read_if_there(file)
    try:
        return None if data is None else Holder.model_validate_json(data)
    except ValidationError as error:
        problem = error.errors()[0]
        field = ".".join(map(str, problem["loc"]))
        raise StoreError(f"{store.where(file)} is damaged: {field}: {problem['msg']}; delete it") from None
