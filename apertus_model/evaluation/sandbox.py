"""Runs programs that a model wrote, in bubblewrap (a Debian package).

A program sees a file system with the standard library and the system's libraries, read-only, and an empty
`/tmp` in memory, of bounded size and number of files; no `/proc`, no `/sys`, no network, no other process, no
environment and no open file. It has no capability, even where this process is root, and starts no process or
thread: a filter of system calls (`sandbox_filter.py` lists them) refuses those, other namespaces, and memory
that no limit counts. So limits on one process bound the whole program, also for root, whom RLIMIT_NPROC does
not bind. Page tables alone are not counted: with 65,530 mappings, half a gigabyte. As first process of its
namespace it cannot end itself by a signal.

Invariant: nothing runs outside the sandbox: if it cannot be set up, `Sandbox` raises SandboxError. A program
has passed only if its last statement was reached (`sandbox_runner.py`).
"""

import json
import os
import platform
import secrets
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from apertus_model.evaluation.sandbox_filter import ARCHITECTURES, syscall_filter
from specs.errors import StageError

INSTALL = "apt-get install bubblewrap"
FIX = (
    "Fix: run on a machine that allows unprivileged user namespaces, or give the container CAP_SYS_ADMIN, or"
    " leave out the tasks that run code"
)
RUNNER = Path(__file__).with_name("sandbox_runner.py")
SYSTEM_LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64")
DEVICES = ("/dev/null", "/dev/urandom")
LONGEST_VERDICT = 4096
TRIAL = """
import os
for attempt in (os.fork, lambda: open("/file", "w"), lambda: os.listdir("/proc/1")):
    try:
        attempt()
    except OSError:
        continue
    raise AssertionError("the sandbox does not hold")
"""

Kind = Literal["passed", "wrong", "crashed", "timed_out"]
KINDS: tuple[Kind, ...] = ("passed", "wrong", "crashed", "timed_out")


class SandboxError(StageError):
    """The sandbox cannot be set up here."""


@dataclass(frozen=True)
class Limits:
    """Limits on one program. The published scorer of HumanEval allows three seconds by the clock; here they
    are seconds of a core, so that a loaded machine fails no program."""

    cpu_seconds: int = 3
    wall_seconds: float = 15.0
    memory: int = 1 << 30
    """Bytes of address space."""
    file_size: int = 16 << 20
    temporary: int = 64 << 20
    """Bytes of all files in /tmp."""
    files: int = 1024
    """Files, folders and links in /tmp, and /tmp itself."""
    open_files: int = 32

    def rlimits(self) -> dict[str, tuple[int, int]]:
        """Soft and hard limits by the names of `resource`."""
        return {
            "RLIMIT_CPU": (self.cpu_seconds, self.cpu_seconds),  # SIGKILL: a program can ignore SIGXCPU
            "RLIMIT_AS": (self.memory, self.memory),
            "RLIMIT_FSIZE": (self.file_size, self.file_size),
            "RLIMIT_NOFILE": (self.open_files, self.open_files),
            "RLIMIT_NPROC": (1, 1),
            "RLIMIT_SIGPENDING": (0, 0),  # also timers
            "RLIMIT_CORE": (0, 0),
        }


class Outcome(BaseModel, frozen=True):
    """The outcome of one program. `wrong`: an assertion failed. `crashed`: anything else ended it before the
    end of its tests. `timed_out`: it reached a time limit."""

    outcome: Kind
    reason: str = ""


class _Verdict(Outcome, frozen=True):
    """An outcome as the runner writes it, in a process that the program may have changed."""

    token: str = ""


class Sandbox:
    """A sandbox that was tried out. Raises SandboxError, with the reason, if it cannot be set up."""

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._command = _command()
        if (machine := platform.machine()) not in ARCHITECTURES:
            raise SandboxError(f"the sandbox knows {' and '.join(ARCHITECTURES)}; this machine is {machine}")
        self._filter = syscall_filter(machine)
        if (outcome := self.run(TRIAL)).outcome != "passed":
            raise SandboxError(f"bubblewrap does not isolate programs on this machine: {outcome.reason}")

    def run(self, program: str) -> Outcome:
        """Runs a Python program, with its tests, to its end. SandboxError if it was not started."""
        token = secrets.token_hex(32)
        request = {
            "program": program,
            "limits": self._limits.rlimits(),
            "temporary": f"size={self._limits.temporary},nr_inodes={self._limits.files},mode=0755",
            "filter": self._filter.hex(),
        }
        content = json.dumps(request).encode()
        source, info = (os.fdopen(os.memfd_create(name), "wb+", buffering=0) for name in ("request", "info"))
        with source, info:
            source.write(len(content).to_bytes(8, "big") + content + token.encode())
            source.seek(0)
            own = ["--info-fd", str(info.fileno()), "--", *_interpreter()]
            with subprocess.Popen(
                [*self._command[:-1], *own, self._command[-1]],
                stdin=source,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[info.fileno()],
                env={},
            ) as process:
                status, seconds = _wait(process, info.fileno(), self._limits.wall_seconds)
                assert process.stdout and process.stderr
                started, _, verdict = os.read(process.stdout.fileno(), LONGEST_VERDICT).partition(b"\n")
                output = os.read(process.stderr.fileno(), LONGEST_VERDICT).decode(errors="replace").strip()
        if started != b"started":
            reason = output or f"not started, status {status}"
            raise SandboxError(f"bubblewrap cannot run a program here ({reason}). {FIX}")
        return _outcome(status, seconds, verdict, token, self._limits)

    def run_all(self, programs: Sequence[str], workers: int = 0) -> list[Outcome]:
        """The outcomes of programs, in their order; `workers` at a time, by default one for each core."""
        workers = min(workers or len(os.sched_getaffinity(0)), len(programs))
        with ThreadPoolExecutor(max(workers, 1)) as pool:
            return list(pool.map(self.run, programs))


def _wait(process: subprocess.Popen[bytes], info: int, limit: float) -> tuple[int | None, float]:
    """The exit status of bubblewrap (None: killed at the time limit) and the seconds of computing. The
    program is killed and not bubblewrap, which waits for its child, so that no process is left to reap."""
    handle, poll, ended = os.pidfd_open(process.pid), select.poll(), False
    poll.register(handle, select.POLLIN)
    try:
        ended = bool(poll.poll(1000 * limit))
    finally:
        os.close(handle)
        if not ended:
            written = os.pread(info, LONGEST_VERDICT, 0)
            os.kill(json.loads(written)["child-pid"] if written else process.pid, signal.SIGKILL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    return process.returncode if ended else None, usage.ru_utime + usage.ru_stime


def _outcome(status: int | None, seconds: float, verdict: bytes, token: str, limits: Limits) -> Outcome:
    """The outcome from bubblewrap's exit status (None: killed at the limit), seconds, and the verdict."""
    if status is None:
        return Outcome(outcome="timed_out", reason=f"over {limits.wall_seconds:g} s")
    # The limit counts ticks of the clock and `seconds` does not, so they may differ by several percent.
    if status == 128 + signal.SIGKILL and seconds >= limits.cpu_seconds / 2:
        return Outcome(outcome="timed_out", reason=f"over {limits.cpu_seconds} s of computing")
    if status > 128:
        return Outcome(outcome="crashed", reason=f"killed by signal {status - 128}")
    left = Outcome(outcome="crashed", reason="the program left before the end of its tests")
    try:
        claim = _Verdict.model_validate_json(verdict)
    except ValidationError:
        return left
    if claim.outcome == "passed" and not (status == 0 and secrets.compare_digest(claim.token, token)):
        return left
    return Outcome(outcome=claim.outcome, reason=claim.reason)


def _interpreter() -> list[str]:
    """The interpreter of this environment without its packages. It is isolated as by `-I`, except that it
    reads the seed of hashes, so that sets have the same order in each run."""
    executable = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    return [executable, "-s", "-S", "-P", "-B", "-X", "utf8", "-c"]


def _command() -> list[str]:
    """The command of bubblewrap; its last argument is the runner, which mounts /tmp and then drops the only
    capability. SandboxError if bubblewrap is missing."""
    bubblewrap = shutil.which("bwrap")
    if bubblewrap is None:
        raise SandboxError(f"bubblewrap is not installed. Fix: {INSTALL}")
    shown: list[str] = []
    for path in SYSTEM_LIBRARIES:
        if os.path.islink(path):
            shown += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            shown += ["--ro-bind", path, path]
    prefix = os.path.realpath(sys.base_prefix)
    for own in (_interpreter()[0], f"{prefix}/lib", f"{prefix}/lib64"):
        if os.path.exists(own) and not (prefix == "/usr" and own.startswith("/usr/lib")):
            shown += ["--ro-bind", own, own]
    for device in DEVICES:
        shown += ["--dev-bind", device, device]
    return [
        bubblewrap,
        *("--unshare-user-try", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"),
        *("--unshare-cgroup-try", "--as-pid-1", "--new-session", "--die-with-parent", "--clearenv"),
        *("--cap-drop", "ALL", "--cap-add", "CAP_SYS_ADMIN", "--setenv", "PYTHONHASHSEED", "0"),
        *shown,
        *("--dir", "/tmp", "--remount-ro", "/"),
        RUNNER.read_text("utf-8"),
    ]
