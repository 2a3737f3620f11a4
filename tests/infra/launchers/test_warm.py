"""Stages that are forked from a process which has imported what they need."""

from __future__ import annotations

import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.launchers import warm
from infra.launchers.warm import ForkedStage, ServerLost, StageServer
from infra.liveness import ROOT, STOP_SIGNALS

pytestmark = pytest.mark.skipif(
    any(Path(device).exists() for device in warm.GPU_DEVICES), reason="there is a GPU, so nothing is forked"
)
Fork = Callable[..., ForkedStage]
STATES = """
import json, os, sys
print(json.dumps({
    "arguments": arguments,
    "environment": sorted(os.environ),
    "leads": os.getsid(0) == os.getpgrp() == os.getpid(),
    "sockets": [
        fd
        for fd in range(64)
        if os.path.exists(f"/proc/self/fd/{fd}") and "socket" in os.readlink(f"/proc/self/fd/{fd}")
    ],
    "title": open("/proc/self/cmdline").read().strip(chr(0)),
    "input": sys.stdin.read(),
}))
sys.exit(7)
"""
WAITS = "import sys; print('up', flush=True); sys.stdin.read(); print('over', flush=True)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the modules are that a server can run."""
    return tmp_path_factory.mktemp("modules")


@pytest.fixture
def server(folder: Path) -> Iterator[StageServer]:
    server = StageServer(
        os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)]), "PYTHONUNBUFFERED": "1"}
    )
    yield server
    server.process.kill()
    server.process.wait()


numbers = itertools.count()


def write_module(folder: Path, name: str, program: str) -> str:
    """A module whose `main` is a few lines; its name."""
    (folder / f"{name}.py").write_text("def main(*arguments):\n" + textwrap.indent(program.strip(), "    "))
    return name


@pytest.fixture
def fork(server: StageServer, folder: Path) -> Fork:
    """Forks a program of a few lines."""

    def fork(program: str, *arguments: str, **variables: str) -> ForkedStage:
        module = write_module(folder, f"program_{next(numbers)}", program)
        return server.start(module, arguments, {"PATH": os.environ["PATH"], **variables})

    return fork


def end_of(stage: ForkedStage) -> int:
    """The exit code, when it is there."""
    deadline = time.monotonic() + 60
    while (code := stage.poll()) is None:
        assert time.monotonic() < deadline, "the stage did not end"
        time.sleep(0.01)
    return code


def test_a_forked_stage_has_its_own_session_pipes_environment_and_exit_code(fork: Fork) -> None:
    stage = fork(STATES, "job.json", COLOUR="red")
    stage.stdin.write(b"from the launcher")
    stage.stdin.close()
    told = json.loads(stage.stdout.read())
    assert end_of(stage) == 7
    assert told["arguments"] == ["job.json"]
    assert {"COLOUR", "PATH"} <= {*told["environment"]} <= {"COLOUR", "PATH", "LC_CTYPE"}
    assert told["leads"], "a session and a process group of its own"
    assert told["sockets"] == [], "the launcher's socket and channel are the server's"
    assert told["input"] == "from the launcher"
    assert told["title"].endswith(" job.json")


ENDS = """
import atexit, sys, threading, time
class Imported:
    def __del__(self):
        print("freed", flush=True)
sys.modules["imported"] = Imported()
atexit.register(print, "handler", flush=True)
threading.Thread(target=lambda: (time.sleep(0.2), print("thread", flush=True))).start()
"""


@pytest.mark.parametrize(("code", "freed"), [(5, b""), (None, b"freed\n")])
def test_a_stage_with_an_exit_code_ends_after_threads_and_handlers_and_frees_nothing(
    fork: Fork, code: int | None, freed: bytes
) -> None:
    stage = fork(f"{ENDS}return {code}")
    assert stage.stdout.read() == b"thread\nhandler\n" + freed
    assert end_of(stage) == (code or 0)


def test_one_can_wait_for_the_end_of_a_stage(fork: Fork) -> None:
    stage = fork(WAITS)
    assert stage.stdout.readline() == b"up\n" and stage.poll() is None
    stage.stdin.close()
    assert stage.wait() == stage.wait() == 0


def test_a_stage_that_a_signal_ended_says_which(fork: Fork) -> None:
    stage = fork(WAITS)
    assert stage.stdout.readline() == b"up\n"
    os.killpg(stage.pid, signal.SIGKILL)
    assert end_of(stage) == -signal.SIGKILL


def test_stages_that_run_at_the_same_time_do_not_hold_each_other_s_pipes(fork: Fork) -> None:
    first, second, third = (fork(WAITS) for _ in range(3))
    for stage in (first, second, third):
        assert stage.stdout.readline() == b"up\n"
    for stage in (second, first, third):  # a pipe that another of them held open would not end
        assert stage.poll() is None
        stage.stdin.close()
        assert stage.stdout.read() == b"over\n"
        assert end_of(stage) == 0


def test_a_stage_outlives_its_server(server: StageServer, fork: Fork) -> None:
    stage = fork(WAITS)
    assert stage.stdout.readline() == b"up\n"
    server.process.kill()
    server.process.wait()
    assert stage.poll() is None
    with pytest.raises(ServerLost):
        fork(WAITS)
    stage.stdin.close()
    assert stage.stdout.read() == b"over\n"
    assert end_of(stage) == -signal.SIGKILL, "nobody knows its exit code"


def test_the_end_of_a_stage_is_seen_although_its_server_is_stopped(
    server: StageServer, fork: Fork, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = fork(WAITS)
    assert stage.stdout.readline() == b"up\n"
    os.kill(server.process.pid, signal.SIGSTOP)
    monkeypatch.setattr(warm, "ANSWER_SECONDS", 0.2)
    stage.stdin.close()
    assert stage.stdout.read() == b"over\n"
    assert end_of(stage) == -signal.SIGKILL
    assert server.alive


def test_a_server_that_is_stopped_is_killed_and_runs_nothing(
    server: StageServer, fork: Fork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.kill(server.process.pid, signal.SIGSTOP)
    monkeypatch.setattr(warm, "ANSWER_SECONDS", 0.2)
    with pytest.raises(ServerLost, match=r"has not answered for 0\.2 s"):
        fork(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert not server.alive
    assert server.process.wait(60) == -signal.SIGKILL
    assert not (tmp_path / "ran").exists()


def test_nobody_waits_for_a_server_when_the_stage_is_not_wanted_any_more(
    server: StageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.kill(server.process.pid, signal.SIGSTOP)
    monkeypatch.setattr(warm, "ANSWER_SECONDS", 3600)
    wanted = iter([True, True])
    with pytest.raises(ServerLost):
        server.start("absent", [], os.environ, lambda: next(wanted, False))


def test_the_end_of_a_launcher_ends_its_server_and_tells_its_stages(folder: Path) -> None:
    write_module(folder, "waits", WAITS)
    launcher = f"""
import os, time
from infra.launchers.warm import StageServer
server = StageServer(os.environ | {{"PYTHONPATH": {os.pathsep.join([str(ROOT), str(folder)])!r}}})
stage = server.start("waits", [], os.environ)
assert stage.stdout.readline() == b"up\\n"
print(server.process.pid, stage.pid, flush=True)
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", launcher], stdout=subprocess.PIPE, cwd=ROOT)
    assert process.stdout is not None
    children = [Path(f"/proc/{pid}") for pid in process.stdout.readline().split() for pid in [int(pid)]]
    assert len(children) == 2
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while any(child.exists() for child in children):
        assert time.monotonic() < deadline, "the server or its stage is still there"
        time.sleep(0.05)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_that_tells_a_run_to_end_ends_stages_and_not_their_server(
    server: StageServer, fork: Fork, number: signal.Signals
) -> None:
    os.kill(server.process.pid, number)  # it may still be starting
    stage = fork(WAITS)
    assert stage.stdout.readline() == b"up\n"
    for pid in (server.process.pid, stage.pid):
        os.kill(pid, number)
    assert end_of(stage) == -number
    assert server.alive


def test_a_server_ends_when_its_launcher_closes_it(server: StageServer, fork: Fork) -> None:
    stage = fork(WAITS)
    server.close()
    assert server.process.wait(60) == 0
    stage.stdin.close()
    assert stage.stdout.read() == b"up\nover\n"


def test_one_server_serves_all_stages_with_the_same_environment_for_imports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[str] = []

    class Server:
        alive = True

        def __init__(self, environment: dict[str, str], *program: Any) -> None:
            started.append(environment["OMP_NUM_THREADS"])

    monkeypatch.setattr(warm, "StageServer", Server)
    monkeypatch.setattr(warm, "_servers", {})
    one = warm.server_for({"OMP_NUM_THREADS": "1", "COLOUR": "red"})
    assert warm.server_for({"OMP_NUM_THREADS": "1", "COLOUR": "blue"}) is one
    assert warm.server_for({"OMP_NUM_THREADS": "2"}) is not one
    one.alive = False  # type: ignore[union-attr, misc]
    assert warm.server_for({"OMP_NUM_THREADS": "1"}) is not one
    assert started == ["1", "2", "1"]


def test_nothing_is_forked_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(warm, "GPU_DEVICES", (str(tmp_path),))
    assert warm.server_for(os.environ) is None


def test_a_start_whose_server_is_lost_closes_its_pipes_once(server: StageServer) -> None:
    """A second time would close what has their numbers by then."""
    os.kill(server.process.pid, signal.SIGSTOP)
    threading.Timer(0.3, server.process.kill).start()
    with pytest.raises(ServerLost) as lost:
        server.start("absent", [], os.environ)
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(16)]
    del lost
    gc.collect()
    for other in others:
        os.fstat(other)
        os.close(other)
