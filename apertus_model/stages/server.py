"""Forks stages from a process that has imported their modules: `python -m apertus_model.stages.server`.

Its standard input is a socket of the launcher (`infra.launchers.warm`). Each message brings the standard
input and output of a stage, and a channel: the fork reads from it what to run; the server answers with the
stage's process id and, at its end, with its exit code.

Invariants: signals that end a run do not end the server, which must report how its stages ended; nothing is
computed here, so no thread of a library runs when it forks; the server holds no end of a stage's pipes after
the fork; it ends when the launcher closes the socket or dies.
"""

import atexit
import contextlib
import importlib
import json
import os
import selectors
import shlex
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from setproctitle import setproctitle

from infra.imports import quick_imports
from infra.liveness import STOP_SIGNALS

STAGES = "apertus_model.stages"
PRELOADED = (  # one import between two checks of the socket, so that a request waits for at most one
    *(f"{STAGES}.{name}" for name in ("tokenizer", "corpus", "mixture", "conversations")),
    "specs.built",
    *("torch", "torch.distributed.tensor", "torch._dynamo", "torch._inductor.compile_fx", "datasets"),
    "apertus_model.device",
    f"{STAGES}.train",
    f"{STAGES}.evaluate",
    f"{STAGES}.completions",
    f"{STAGES}.export",
    "transformers.models.apertus.modeling_apertus",
)
LAUNCHER = 0  # the file descriptor of the launcher's socket


@dataclass
class ForkServer:
    """Waits for requests and for the ends of its children."""

    handlers: dict[signal.Signals, Any]  # for the signals that only the children handle
    imports: deque[str]  # modules to import while there is no request
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    channels: dict[int, tuple[int, socket.socket]] = field(
        default_factory=dict
    )  # process id and channel of each child, by the descriptor of its process

    def serve(self) -> socket.socket | None:
        """Serves requests. Returns None when the launcher is gone, in a child the channel of its request."""
        control = socket.socket(fileno=os.dup(LAUNCHER))
        self.selector.register(control, selectors.EVENT_READ)
        while True:
            ready = self.selector.select(0 if self.imports else None)
            if not ready:  # an error is reported by the stage that needs the module
                with contextlib.suppress(Exception), quick_imports():
                    importlib.import_module(self.imports.popleft())
            for key, _ in ready:
                if key.fileobj is not control:
                    self._report(key.fd)
                    continue
                message, descriptors, _, _ = socket.recv_fds(control, 16, 3)
                if not message:
                    return None
                if (channel := self._fork(*descriptors)) is not None:
                    control.close()
                    return channel

    def _fork(self, stdin: int, stdout: int, channel: int) -> socket.socket | None:
        """Forks a child. Returns the channel in the child, None in the server."""
        pid = os.fork()
        if pid:
            os.close(stdin)
            os.close(stdout)
            process = os.pidfd_open(pid)
            self.channels[process] = (pid, socket.socket(fileno=channel))
            self.selector.register(process, selectors.EVENT_READ)
            self._answer(process, pid)
            return None
        os.setsid()
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        self.selector.close()
        for process, (_, other) in self.channels.items():
            os.close(process)
            other.close()
        for target in (1, 2):
            os.dup2(stdout, target)
        os.dup2(stdin, 0)
        os.close(stdin)
        os.close(stdout)
        return socket.socket(fileno=channel)

    def _report(self, process: int) -> None:
        """Reports to the launcher that a child has ended."""
        pid, channel = self.channels[process]
        _, status = os.waitpid(pid, 0)
        self._answer(process, os.waitstatus_to_exitcode(status))
        self.selector.unregister(process)
        del self.channels[process]
        os.close(process)
        channel.close()

    def _answer(self, process: int, number: int) -> None:
        with contextlib.suppress(OSError):  # the launcher may be gone
            self.channels[process][1].sendall(f"{number}\n".encode())


def command(*words: str) -> str:
    """The command line that `ps` shows for a forked process."""
    return shlex.join([sys.executable, *(word.removesuffix(".__main__") for word in words)])


@dataclass
class QuickExit:
    """The last `atexit` handler: ends a process without freeing its imports object by object, which takes
    longer than many stages and copies the pages that the process shares with the server."""

    code: int | None = None  # exit code of a program that has returned; if None, Python ends the process

    def __call__(self) -> None:
        if self.code is not None:
            with contextlib.suppress(OSError):  # the launcher may be gone
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(self.code)


def run(module: str, arguments: list[str], environment: dict[str, str], quick_exit: QuickExit) -> None:
    """Runs `main(*ARGUMENTS)` of a module as the program of this process, and exits with what it returns."""
    os.environ.clear()
    os.environ.update(environment)
    setproctitle(command("-m", module, *arguments))
    quick_exit.code = importlib.import_module(module).main(*arguments)
    sys.exit(quick_exit.code)


def serve(prepare: Callable[[], None] = lambda: None, preloaded: Iterable[str] = ()) -> None:
    """Answers requests until the launcher is gone; in a child, runs what is requested. `prepare` is called
    before the first request is read; `preloaded` modules are imported while there is no request."""
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in STOP_SIGNALS}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    quick_exit = QuickExit()
    atexit.register(quick_exit)  # before imported modules register handlers: the last one runs first
    prepare()
    channel = ForkServer(handlers, deque(preloaded)).serve()
    if channel is not None:
        with channel, channel.makefile() as lines:
            request = json.loads(lines.readline())
        run(**request, quick_exit=quick_exit)


if __name__ == "__main__":
    setproctitle(command("-m", f"{STAGES}.server"))  # before any change of the environment
    serve(preloaded=PRELOADED)
