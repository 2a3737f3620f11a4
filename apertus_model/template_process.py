"""Renders the chat templates of models in a separate process, which has bounds on time, memory and output: a
stranger may have written the template. transformers does the rendering, in that process as in any other.

No list of what is dangerous in a template could be complete, so the process as a whole is bounded (`Bounds`).

Invariants: one process serves all templates of its parent, in turn; it ends with its parent, or when a
template exceeds the time. What a template raises, and an exceeded bound, is a jinja2.TemplateError.
"""

import functools
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError

START_SECONDS = 300.0
WAITING = 12
"""The time by the clock in which an answer must come, as a multiple of the seconds of a core: the machine may
be busy."""


class Bounds(NamedTuple):
    """Bounds on one conversation."""

    seconds: float = 10.0  # of a core
    memory: int = 2**30  # bytes, beyond those of the process at its start
    characters: int = 2**24  # of the text


BOUNDS = Bounds()


class _Process:
    """The process, seen from its parent."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pipe, theirs = Pipe()
        number = str(theirs.fileno())
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__)), number],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self._receive(START_SECONDS)

    def render(self, arguments: dict[str, Any]) -> list[str]:
        with self._lock:
            bounds = BOUNDS
            try:
                self._pipe.send((arguments, tuple(bounds)))
                answer = json.loads(self._receive(WAITING * bounds.seconds))
            except (EOFError, OSError):
                _process.cache_clear()
                self._process.kill()
                if (code := self._process.wait()) in (-signal.SIGPROF, -signal.SIGKILL):
                    raise TemplateError(
                        f"it takes more than {bounds.seconds:g} seconds for a conversation"
                    ) from None
                raise TemplateError(f"the process that renders it ended with exit code {code}") from None
        if "error" in answer:
            raise TemplateError(answer["error"])
        return list(answer["texts"])

    def _receive(self, seconds: float) -> bytes:
        """The next message. EOFError if there is none within the time."""
        if not self._pipe.poll(seconds):
            raise EOFError
        return self._pipe.recv_bytes()


@functools.lru_cache(1)
def _process(owner: int) -> _Process:
    """The process of a parent, by its id: a forked child does not share it."""
    return _Process()


def replace_rendering() -> None:
    """Has transformers render all chat templates in the process, without the places of generated text."""
    from transformers import tokenization_utils_base

    tokenization_utils_base.render_jinja_template = lambda **named: (_process(os.getpid()).render(named), [])


def _answer(render: Any, arguments: dict[str, Any], bounds: Bounds) -> bytes:
    try:
        texts, _ = render(**arguments)
        if sum(map(len, texts)) <= bounds.characters:
            return json.dumps({"texts": texts}).encode()
        error = f"it writes more than {bounds.characters:,} characters for a conversation"
    except MemoryError:
        error = f"it takes more than {bounds.memory >> 20:,} MiB of memory"
    except Exception as raised:  # a template can raise anything
        known = isinstance(raised, TemplateError) and str(raised)
        error = (known or f"{type(raised).__name__}: {raised}")[:1000]
    return json.dumps({"error": error}).encode()


def _main(pipe: Connection) -> None:
    """Answers requests until the parent ends."""
    from transformers.utils.chat_template_utils import render_jinja_template

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it ends with its parent, which may finish its work first
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, whatever it computes
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pipe.send_bytes(b"")
    while True:
        try:
            arguments, limits = pipe.recv()
        except EOFError:
            return
        bounds = Bounds(*limits)
        resource.setrlimit(resource.RLIMIT_AS, (held + bounds.memory, resource.RLIM_INFINITY))
        signal.setitimer(signal.ITIMER_PROF, bounds.seconds)
        answer = _answer(render_jinja_template, arguments, bounds)
        signal.setitimer(signal.ITIMER_PROF, 0)
        pipe.send_bytes(answer)


if __name__ == "__main__":
    _main(Connection(int(sys.argv[1])))
