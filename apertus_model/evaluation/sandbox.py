"""Runs programs that a model wrote, in bubblewrap (a Debian package).

A program sees a file system with the standard library and the system's libraries, read-only, and an empty
`/tmp` of bounded size in memory; no `/proc`, no `/sys`, no network, no other process, no environment and no
open file. It has no capability, even where this process is root, and starts no process or thread: a filter of
system calls refuses those, other namespaces, and memory that no limit counts. So limits on one process
bound the whole program, also for root, whom RLIMIT_NPROC does not bind.

Invariant: nothing runs outside the sandbox: if it cannot be set up, `Sandbox` raises SandboxError. A program
has passed only if its last statement was reached (`sandbox_runner.py`).
"""

from __future__ import annotations

import errno
import json
import os
import platform
import secrets
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

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
    open_files: int = 32

    def rlimits(self) -> dict[str, tuple[int, int]]:
        """Soft and hard limits by the names of `resource`."""
        return {
            "RLIMIT_CPU": (self.cpu_seconds, self.cpu_seconds + 1),
            "RLIMIT_AS": (self.memory, self.memory),
            "RLIMIT_FSIZE": (self.file_size, self.file_size),
            "RLIMIT_NOFILE": (self.open_files, self.open_files),
            "RLIMIT_NPROC": (1, 1),
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
        self._command = _command(self._limits)
        if (outcome := self.run(TRIAL)).outcome != "passed":
            raise SandboxError(f"bubblewrap does not isolate programs on this machine: {outcome.reason}")

    def run(self, program: str) -> Outcome:
        """Runs a Python program, with its tests, and waits for its end. SandboxError if it was not
        started."""
        token = secrets.token_hex(32)
        request = json.dumps({"program": program, "limits": self._limits.rlimits()}).encode()
        reading, writing = os.pipe()
        errors, filter_, source = (os.memfd_create(name) for name in ("errors", "filter", "request"))
        try:
            _fill(filter_, syscall_filter(platform.machine()))
            _fill(source, len(request).to_bytes(8, "big") + request + token.encode())
            process = subprocess.Popen(
                [*self._command[:-1], "--seccomp", str(filter_), "--", *_interpreter(), self._command[-1]],
                stdin=source,
                stdout=writing,
                stderr=errors,
                pass_fds=[filter_],
                env={},
            )
            try:
                status = process.wait(self._limits.wall_seconds)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                process.kill()
                process.wait()
            os.close(writing)
            writing = -1
            started, _, verdict = os.read(reading, LONGEST_VERDICT).partition(b"\n")
            if started != b"started":
                os.lseek(errors, 0, os.SEEK_SET)
                output = os.read(errors, LONGEST_VERDICT).decode(errors="replace").strip()
                reason = output or f"not started, status {status}"
                raise SandboxError(f"bubblewrap cannot run a program here ({reason}). {FIX}")
        finally:
            for descriptor in (reading, writing, errors, filter_, source):
                if descriptor >= 0:
                    os.close(descriptor)
        return _outcome(status, verdict, token, self._limits)

    def run_all(self, programs: Sequence[str], workers: int = 0) -> list[Outcome]:
        """The outcomes of programs, in their order; `workers` at a time, by default one for each core that
        this process may use."""
        workers = min(workers or len(os.sched_getaffinity(0)), len(programs))
        with ThreadPoolExecutor(max(workers, 1)) as pool:
            return list(pool.map(self.run, programs))


def _outcome(status: int | None, verdict: bytes, token: str, limits: Limits) -> Outcome:
    """The outcome from the exit status of bubblewrap (None: it was killed at the time limit) and from what
    the runner wrote."""
    if status is None:
        return Outcome(outcome="timed_out", reason=f"over {limits.wall_seconds:g} s")
    if status in (128 + signal.SIGXCPU, -signal.SIGXCPU):
        return Outcome(outcome="timed_out", reason=f"over {limits.cpu_seconds} s of computing")
    if status > 128:
        return Outcome(outcome="crashed", reason=f"killed by signal {status - 128}")
    try:
        found = _Verdict.model_validate_json(verdict)
    except ValidationError:
        return Outcome(outcome="crashed", reason="the program left before the end of its tests")
    if found.outcome == "passed" and not (status == 0 and secrets.compare_digest(found.token, token)):
        return Outcome(outcome="crashed", reason="the program left before the end of its tests")
    return Outcome(outcome=found.outcome, reason=found.reason)


def _fill(descriptor: int, content: bytes) -> None:
    with os.fdopen(os.dup(descriptor), "wb") as target:
        target.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)


def _interpreter() -> list[str]:
    """The interpreter of this environment without its packages. It is isolated as by `-I`, except that it
    reads the seed of hashes, so that sets have the same order in each run."""
    executable = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    return [executable, "-s", "-S", "-P", "-B", "-X", "utf8", "-c"]


def _command(limits: Limits) -> list[str]:
    """The command of bubblewrap, without the filter; its last argument is the runner. SandboxError if
    bubblewrap is missing."""
    found = shutil.which("bwrap")
    if found is None:
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
        found,
        *("--unshare-user-try", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"),
        *("--unshare-cgroup-try", "--cap-drop", "ALL", "--new-session", "--die-with-parent", "--clearenv"),
        *("--setenv", "PYTHONHASHSEED", "0"),
        *shown,
        *("--size", str(limits.temporary), "--tmpfs", "/tmp", "--remount-ro", "/", "--chdir", "/tmp"),
        RUNNER.read_text("utf-8"),
    ]


# The filter of system calls, as instructions of classic BPF: (code, jump if true, jump if false, constant).
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
_NUMBER, _ARCHITECTURE = 0, 4  # offsets in struct seccomp_data
_X32 = 0x40000000  # numbers from here on are those of another calling convention

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
REFUSED = {
    # processes and threads
    "fork": (57, None),
    "vfork": (58, None),
    "clone": (56, 220),
    "clone3": (435, 435),
    # other namespaces and mounts
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    # networks that no namespace holds, such as that to the host of a virtual machine
    "socket": (41, 198),
    # memory that belongs to no process
    "shmget": (29, 194),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    # other processes, and parts of the kernel that no program needs
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
}
"""Numbers of the refused system calls on x86-64 and on aarch64; None: the architecture has no such call."""


def syscall_filter(machine: str) -> bytes:
    """The filter for bubblewrap's `--seccomp`: REFUSED fail with EPERM, all others are allowed. SandboxError
    for a machine of another architecture."""
    if machine not in ARCHITECTURES:
        raise SandboxError(f"the sandbox knows {' and '.join(ARCHITECTURES)}; this machine is {machine}")
    column = list(ARCHITECTURES).index(machine)
    numbers = [pair[column] for pair in REFUSED.values() if pair[column] is not None]
    refuse = len(numbers) + 2  # instructions after the first comparison of the number
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, refuse - 1, 0, _X32),
        *((_EQUAL, refuse - 2 - index, 0, number) for index, number in enumerate(numbers)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _REFUSE),
    ]
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)
