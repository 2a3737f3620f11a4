"""Runs of the smoke recipe as a user starts them: `apertus run` in processes of their own."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.prefect_server import ROOT, Prefect

SMOKE = "specs/recipes/smoke.yaml"
MARK = "APERTUS_TEST_MARK"
INTERRUPTED = "interrupted; committed results are kept, the same command resumes from them.\n"


class Run:
    """One command line, with every process that descends from it findable by a mark in its environment."""

    def __init__(
        self,
        home: Path,
        *arguments: str,
        overrides: Iterable[str] = (),
        importtime: bool = False,
        api: str | None = None,
        module: str = "flows.cli",
        on: Sequence[str] = (),
    ) -> None:
        """`on`: the words of a command that runs this one."""
        self.mark = uuid.uuid4().hex
        environment = os.environ | {
            MARK: self.mark,
            "PREFECT_HOME": str(home / "prefect"),
            "APERTUS_SCRATCH": str(home),
            "COLUMNS": "200",
        }
        environment.pop("PREFECT_API_URL", None)
        if api is not None:
            environment["PREFECT_API_URL"] = api
        changes = [word for override in overrides for word in ("--set", override)]
        python = [sys.executable, *(["-X", "importtime"] if importtime else [])]
        program = [*on, *python, "-m", module, *arguments, *changes]
        self.output = home / f"output-{self.mark}.txt"
        self.errors = home / f"errors-{self.mark}.txt"
        with open(self.output, "w") as output, open(self.errors, "w") as errors:
            self.process = subprocess.Popen(
                program, cwd=ROOT, env=environment, stdout=output, stderr=errors, start_new_session=True
            )

    @property
    def text(self) -> str:
        return self.output.read_text() + self.errors.read_text()

    def wait(self, timeout: float = 800) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill_everything()
            raise AssertionError(f"the command did not end in {timeout} s:\n{self.text}") from None

    def wait_for(self, condition: Callable[[], bool], timeout: float = 120) -> None:
        """Polls until a condition holds while the command runs."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert self.process.poll() is None, f"the command ended too early:\n{self.text}"
            assert time.monotonic() < deadline, f"nothing happened in {timeout} s:\n{self.text}"
            time.sleep(0.005)

    def processes(self) -> list[int]:
        """Processes that carry the mark, zombies aside."""
        found = []
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            try:
                if self.mark.encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                continue
        return found

    def _stages(self) -> dict[int, str]:
        """Job file by process, of the running stages."""
        found = {}
        for pid in self.processes():
            words = command_line(pid).replace("\0", " ").split()
            if "apertus_model.stages" in words:
                found[pid] = next(word for word in words if word.endswith("job.json"))
        return found

    def stage_processes(self) -> list[int]:
        return list(self._stages())

    def stages_running(self) -> set[str]:
        return set(self._stages().values())

    def kill_everything(self) -> None:
        """kill -9 of every process at once."""
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()

    def no_process_is_left(self, within: float) -> bool:
        deadline = time.monotonic() + within
        while self.processes():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True


def command_line(pid: int) -> str:
    """The words that a process was started with, each ended by a zero byte; empty when it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode()
    except OSError:
        return ""


def cooling_run(
    finished: Path, store: Path, home: Path, longer: str, *, processes: int, api: str | None = None
) -> Run:
    """Starts a run in a new store that has everything but the cooldown, which `longer` makes long."""
    shutil.copytree(finished, store)
    shutil.rmtree(store / "cooldown")
    overrides = [longer, f"launch.processes={processes}"]
    arguments = ["run", SMOKE, "--store", str(store), "--until", "cooldown"]
    return Run(home, *arguments, overrides=overrides, api=api)


def ended_as_interrupted(run: Run, tell: Callable[[], object], within: float = 30) -> None:
    """Told to, the run ends with 130, says no more, and leaves no process: in 5 s on an idle machine."""
    deadline = time.monotonic() + within
    tell()
    assert run.wait(within) == 130, run.text
    assert run.errors.read_text() == INTERRUPTED
    assert run.no_process_is_left(deadline - time.monotonic()), [command_line(pid) for pid in run.processes()]


def group_twice(run: Run, number: signal.Signals) -> None:
    """As `timeout` tells what it has started."""
    os.kill(run.process.pid, number)
    os.killpg(run.process.pid, number)


def every_process(run: Run, number: signal.Signals) -> None:
    """As a service manager tells a service."""
    for pid in run.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@pytest.fixture(scope="session")
def crash_seed(request: pytest.FixtureRequest) -> int:
    """What `--crash-seed` says, or a new number."""
    chosen = request.config.getoption("--crash-seed")
    return secrets.randbits(32) if chosen is None else int(chosen)


@pytest.fixture(scope="session")
def crash_rows(request: pytest.FixtureRequest) -> Iterator[list[dict[str, Any]]]:
    """Takes rows of docs/crashes.md, which are written at the end if `--crashes` is given."""
    rows: list[dict[str, Any]] = []
    yield rows
    if rows and request.config.getoption("--crashes"):
        from tests.e2e.crash_table import write

        write(rows)


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="session")
def finished(home: Path) -> Path:
    """A store in which the smoke recipe ran without an interruption."""
    store = home / "uninterrupted"
    run = Run(home, "run", SMOKE, "--store", str(store))
    assert run.wait() == 0, run.text
    assert run.no_process_is_left(10)
    return store


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prefect]:
    """A Prefect server: to start one takes ten seconds."""
    server = Prefect(tmp_path_factory.mktemp("server"))
    try:
        server.start_server()
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="package")
def api(server: Prefect) -> str:
    """Address of a server for runs that are not about their own."""
    return server.api
