"""Stages forked from a process that has already imported what they need.

Importing torch and torchtitan takes several seconds, a fork milliseconds. The launcher keeps one stage server
(`apertus_model.stages.server`) for each value of the variables that libraries read while they are imported. A
forked stage is like any other: it has a session and a process group of its own, the launcher's pipe as its
standard input, and the environment of its own job. Rehearsals of ranks are forked in the same way, by
`apertus_model.rehearsal.server`.

Invariants: the server ends when this process does, however it ends, and not by a signal that tells a run to
end. It holds no end of a stage's pipes, so a stage notices the end of its launcher, and the launcher that of
its stage. A stage whose server died is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from infra.liveness import stop_signals_blocked

GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd")  # CUDA and ROCm do not survive a fork
STAGES = "apertus_model.stages.server"
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
    """The stage server ended before it started the stage."""


class ForkedStage:
    """A stage that the server forked, with the part of the interface of `subprocess.Popen` that the
    launcher uses."""

    def __init__(self, channel: socket.socket, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self.stdin, self.stdout = stdin, stdout
        self.returncode: int | None = None
        self._channel = channel
        self._answers = channel.makefile("r")
        self.pid = self._number()

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs."""
        if self.returncode is None:
            self._channel.setblocking(False)
            try:
                self._channel.recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                return None
            finally:
                self._channel.setblocking(True)
            try:
                self.returncode = self._number()
            except ServerLost:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
                self.returncode = -signal.SIGKILL
            self._channel.close()
        return self.returncode

    def wait(self) -> int:
        """The exit code, once the process has ended."""
        while (code := self.poll()) is None:
            select.select([self._channel], [], [])
        return code

    def _number(self) -> int:
        """The number in the next line from the server."""
        line = self._answers.readline()
        if not line:
            raise ServerLost("the stage server ended")
        return int(line)


class StageServer:
    """The process that stages are forked from.

    Args:
        environment: all variables of the process.
        module: its program, which ends with `apertus_model.stages.server.serve`.
        arguments: the arguments of the program.
    """

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
        return self.process.poll() is None

    def start(self, module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> ForkedStage:
        """Forks a process that runs `main(*ARGUMENTS)` of a module, which returns its exit code.

        Args:
            environment: all variables of its processes.

        Raises:
            ServerLost: the server ended before it forked the stage.
        """
        request = {"module": module, "arguments": [*arguments], "environment": {**environment}}
        stdin_of_stage, stdin = os.pipe()
        stdout, stdout_of_stage = os.pipe()
        pipes = open(stdin, "wb", buffering=0), open(stdout, "rb")  # noqa: SIM115
        ours, theirs = socket.socketpair()
        try:
            socket.send_fds(self._control, [b"fork"], [stdin_of_stage, stdout_of_stage, theirs.fileno()])
            theirs.close()
            ours.sendall(json.dumps(request).encode() + b"\n")
            return ForkedStage(ours, *pipes)
        except (OSError, ServerLost) as error:
            ours.close()
            for pipe in pipes:
                pipe.close()
            raise ServerLost(str(error)) from error
        finally:
            theirs.close()
            os.close(stdin_of_stage)
            os.close(stdout_of_stage)


_servers: dict[tuple[str | None, ...], StageServer] = {}
_lock = threading.Lock()


def server_for(environment: Mapping[str, str]) -> StageServer | None:
    """The stage server of this process for stages with this environment, started if there is none; None on a
    machine with a GPU."""
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
