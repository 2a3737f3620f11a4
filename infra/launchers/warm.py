"""Stages forked from a process that has already imported what they need.

Importing torch and torchtitan takes several seconds, a fork milliseconds. The launcher keeps one stage server
(`apertus_model.stages.server`) for each value of the variables that libraries read while they are imported. A
forked stage is like any other: it has its own session, process group and environment, and the launcher's pipe
as standard input. `apertus_model.rehearsal.server` forks rehearsals of ranks in the same way.

Invariants: the server ends when this process does, however it ends, and not by a signal that tells a run to
end. It holds no end of a stage's pipes, so a stage notices the end of its launcher, and the launcher that of
its stage. Nobody waits for a server that does not answer: the launcher kills one that does not fork, and sees
in /proc that a stage has ended whose server says nothing. A stage outlives its server.
"""

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from infra.liveness import started, stop_signals_blocked

GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd")  # CUDA and ROCm do not survive a fork
STAGES = "apertus_model.stages.server"
ANSWER_SECONDS = 30.0  # a server that imports modules answers between two of them
TITLE = "-" * 512  # an argument that leaves room for what `ps` shows of a stage
READ_AT_IMPORT = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "PYTHONHASHSEED",
    "PYTHONPATH",
    "HF_HUB_OFFLINE",
    "HF_HOME",
    "TMPDIR",
)


class ServerLost(RuntimeError):
    """The stage server did not fork the stage: it has ended, or did not answer."""


class ForkedStage:
    """A stage that the server forked, with the part of the interface of `subprocess.Popen` that the
    launcher uses. ServerLost when the server has ended before it answered with the process id."""

    def __init__(self, channel: socket.socket, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self.stdin, self.stdout = stdin, stdout
        self.returncode: int | None = None
        self._channel = channel
        self._answers = channel.makefile("r")
        pid = self._number()
        if pid is None:
            raise ServerLost("the stage server has ended")
        self.pid = pid
        self._start = started(pid)
        self._ended_at: float | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """The exit code: None while the process runs, -9 when the server does not report it."""
        with self._lock:
            if self.returncode is not None:
                return self.returncode
            answered = _readable(self._channel, 0)
            self.returncode = self._number() if answered else None
            if self.returncode is None and (self._start is None or started(self.pid) != self._start):
                self._ended_at = self._ended_at or time.monotonic()
                if answered or time.monotonic() - self._ended_at > ANSWER_SECONDS:
                    self.returncode = -signal.SIGKILL
            if self.returncode is not None:
                self._channel.close()
            return self.returncode

    def wait(self) -> int:
        """The exit code, once the process has ended."""
        while (code := self.poll()) is None:
            time.sleep(0.05)
        return code

    def _number(self) -> int | None:
        """The number in the next line from the server; None when it has ended."""
        line = self._answers.readline()
        return int(line) if line else None


class StageServer:
    """The process that stages are forked from. `environment`: all of its variables; `module`: its program,
    which ends with `apertus_model.stages.server.serve`; `arguments`: of the program."""

    def __init__(
        self, environment: Mapping[str, str], module: str = STAGES, arguments: Sequence[str] = (TITLE,)
    ) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, stop_signals_blocked():  # until the server ignores them
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**environment, "SPT_NOENV": "1"},  # titles are not written over the environment in /proc
                start_new_session=True,
            )

    def close(self) -> None:
        """Ends the server; running stages are not affected."""
        self._control.close()

    @property
    def alive(self) -> bool:
        return self._control.fileno() >= 0 and self.process.poll() is None

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        wanted: Callable[[], bool] = lambda: True,
        seconds: float | None = None,
    ) -> ForkedStage:
        """Forks a process that runs `main(*ARGUMENTS)` of a module, which returns its exit code. ServerLost
        when the server ended before, or was killed since it did not answer in `seconds`. `environment`: all
        variables of its processes; `wanted`: whether the caller still waits."""
        seconds = ANSWER_SECONDS if seconds is None else seconds
        request = {"module": module, "arguments": [*arguments], "environment": {**environment}}
        stdin_of_stage, stdin = os.pipe()
        stdout, stdout_of_stage = os.pipe()
        pipes = open(stdin, "wb", buffering=0), open(stdout, "rb")  # noqa: SIM115
        ours, theirs = socket.socketpair()
        ours.settimeout(seconds)
        try:
            socket.send_fds(self._control, [b"fork"], [stdin_of_stage, stdout_of_stage, theirs.fileno()])
            theirs.close()
            ours.sendall(json.dumps(request).encode() + b"\n")
            self._wait_for_answer(ours, wanted, seconds)
            return ForkedStage(ours, *pipes)
        except (OSError, ServerLost) as error:
            for end in (ours, *pipes):
                end.close()
            lost = isinstance(error, ServerLost)
            raise ServerLost(str(error) if lost else "the stage server has ended") from error
        finally:
            theirs.close()
            os.close(stdin_of_stage)
            os.close(stdout_of_stage)

    def _wait_for_answer(self, channel: socket.socket, wanted: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not _readable(channel, 0.05):
            if not wanted() or time.monotonic() > deadline:
                self.close()
                self.process.kill()  # so that it never reads the request
                raise ServerLost(f"the stage server has not answered for {seconds:g} s")


def _readable(channel: socket.socket, seconds: float) -> bool:
    """Whether a socket has an answer, or its other end has closed, within some seconds."""
    poller = select.poll()  # `select.select` fails for descriptors above 1023
    poller.register(channel, select.POLLIN)
    return bool(poller.poll(1000 * seconds))


_servers: dict[tuple[str | None, ...], StageServer] = {}
_lock = threading.Lock()


@atexit.register
def _kill_servers() -> None:
    """One that is stopped would not notice that the launcher has closed its socket."""
    for server in _servers.values():
        server.process.kill()


def server_for(environment: Mapping[str, str]) -> StageServer | None:
    """The stage server of this process for stages with this environment; None on a machine with a GPU."""
    if any(Path(device).exists() for device in GPU_DEVICES):
        return None
    return kept_server(environment)


def kept_server(
    environment: Mapping[str, str], module: str = STAGES, arguments: Sequence[str] = (TITLE,)
) -> StageServer:
    """The server of this process for this environment and program, started if there is none."""
    key = (module, *arguments, *(environment.get(name) for name in READ_AT_IMPORT))
    with _lock:
        if key not in _servers or not _servers[key].alive:
            _servers[key] = StageServer(environment, module, arguments)
        return _servers[key]
