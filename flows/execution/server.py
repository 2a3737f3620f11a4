"""Prefect inside `apertus run`: a temporary server for the run, unless `PREFECT_API_URL` names one.

Invariant: the temporary server lives as long as the process, however that ends. It must learn how the run
ended, so the signals that end a run do not end the server. It is killed at exit, after its logs are
delivered; if this process is killed, by a guard that holds the other end of a pipe.

Only this user reads it: requests need a key that the process draws, and hands on in the environment only; the
database is in a folder of its own, `PREFECT_HOME/apertus`, as `PREFECT_HOME` may serve other uses.
"""

import fcntl
import logging
import os
import secrets
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flows.execution import interrupts
from infra.liveness import STOP_SIGNALS, start_guard

SETTINGS = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "true",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "300",
}
KEYS = ("PREFECT_SERVER_API_AUTH_STRING", "PREFECT_API_AUTH_STRING")  # of the server, and of its clients
KEY = f"apertus:{secrets.token_urlsafe(32)}"  # one: further runs of this process find its server running
DATABASE = "PREFECT_SERVER_DATABASE_CONNECTION_URL"
TURN_SECONDS = 60.0  # for the start of another run's server
STARTS = 5  # a server can end at its start when another run creates the same database


def start_prefect() -> None:
    """Sets Prefect up for the rest of this process. Settings in the environment win. ConnectionError when no
    server answers at `PREFECT_API_URL`, the temporary one does not start, or a proxy cannot be used."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    _reach_this_machine_directly()
    _check_proxies()
    from prefect.context import refresh_global_settings_context
    from prefect.settings import get_current_settings

    # Prefect read the environment when it was imported, which may be long ago
    refresh_global_settings_context()
    _log_to_the_server_only()
    url = get_current_settings().api.url
    if url is not None:
        _reach(url)
        return
    import httpx
    from prefect.server.api.server import SubprocessASGIServer
    from pydantic import SecretStr

    class Guarded(SubprocessASGIServer):  # has a guard from its start on, also when `start` retries
        starts = 0

        def _run_uvicorn_command(self) -> subprocess.Popen[Any]:
            self.starts += 1
            if self.starts > STARTS:  # Prefect would go on for ever, as if another process had its port
                raise RuntimeError(f"it ended at each of {STARTS} starts; its errors are above.")
            with interrupts.blocked():
                process = super()._run_uvicorn_command()
                _guard(process.pid)
            return process

        def stop(self) -> None:
            if self.server_process:
                self.server_process.kill()  # SIGTERM, which Prefect sends, is blocked
            super().stop()

    settings = get_current_settings()
    database = _own_database(settings.home)
    os.environ |= dict.fromkeys(KEYS, KEY)
    usual = f"sqlite+aiosqlite:///{settings.home}/prefect.db"
    if settings.server.database.connection_url == SecretStr(usual):
        os.environ[DATABASE] = f"sqlite+aiosqlite:///{database}"
    refresh_global_settings_context()
    server = Guarded()
    with _alone(database.parent):
        try:
            server.start()
        except (RuntimeError, httpx.HTTPError) as error:
            server.stop()  # Prefect would give the same one to the next start
            fix = "run again; or start one and name it in PREFECT_API_URL"
            raise ConnectionError(f"Prefect's temporary server did not start: {error} Fix: {fix}") from error


def _reach_this_machine_directly() -> None:
    """Requests to this machine, from child processes too, bypass a proxy that the environment names."""
    hosts = os.environ.get("no_proxy", os.environ.get("NO_PROXY", ""))  # in the order of Python's clients
    if hosts != "*":
        direct = ",".join([*filter(None, [hosts]), "127.0.0.1", "localhost", "::1"])
        os.environ |= {"no_proxy": direct, "NO_PROXY": direct}


def _check_proxies() -> None:
    """Raises ConnectionError for a proxy that no client can be made with, Prefect's included."""
    import httpx

    try:
        httpx.Client().close()
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        names = [name for name in os.environ if name.upper() in ("ALL_PROXY", "HTTP_PROXY", "HTTPS_PROXY")]
        fix = f"correct or unset {', '.join(sorted(names))}"
        problem = f"no client can use the proxies of the environment: {error}. Fix: {fix}"
        raise ConnectionError(problem) from error


def _guard(pid: int) -> None:
    """Kills the server when this process is gone, but not another process that has reused its number. Blocked
    signals are ignored too, since the shell unblocks them when a command has ended."""
    numbers = " ".join(str(int(number)) for number in STOP_SIGNALS)
    program = f"trap '' {numbers}; read _; " + 'grep -q prefect.server "/proc/$0/cmdline" && kill -9 "$0"'
    start_guard(["/bin/sh", "-c", program, str(pid)])


def _own_database(home: Path) -> Path:
    """A database that nobody else may read, in the folder `apertus` of the folder `home`, which nobody but
    this user may enter. Its name has the version of Prefect: an older one cannot open what a newer one has
    migrated. OSError when it cannot be written, or belongs to another user."""
    from prefect import __version__

    folder = home / "apertus"
    database = folder / f"prefect-{__version__}.db"
    try:
        home.mkdir(0o700, parents=True, exist_ok=True)
        folder.mkdir(0o700, exist_ok=True)
        folder.chmod(0o700)
        database.touch(0o600)  # SQLite's -wal and -shm beside it take its mode
        database.chmod(0o600)
    except OSError as error:
        problem = f"Prefect keeps its database in {home}, which cannot be written ({error.strerror})"
        raise OSError(f"{problem}. Fix: set PREFECT_HOME to a folder that can") from error
    return database


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keeps other runs from starting a server in the folder meanwhile: of two servers that create one
    database, one fails and retries. A run that has waited for `TURN_SECONDS` starts its own all the same."""
    deadline = time.monotonic() + TURN_SECONDS
    with open(folder / "starting", "w") as file:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.1)
            except OSError:  # a filesystem without locks
                break
        yield


def _reach(url: str) -> None:
    """Raises ConnectionError when no server answers at the url."""
    import httpx

    try:
        httpx.get(f"{url}/health", timeout=10)
    except httpx.TransportError as error:
        problem = f"no Prefect server answers at {url} ({error})"
        raise ConnectionError(f"{problem}. Fix: start it, or unset PREFECT_API_URL") from error


def _log_to_the_server_only() -> None:
    """Keeps Prefect's log lines off the terminal, where the observer of the run writes."""
    from prefect.logging.handlers import PrefectConsoleHandler

    for name in (None, "prefect", "prefect.flow_runs", "prefect.task_runs"):
        logger = logging.getLogger(name)
        for handler in list(logger.handlers):
            if isinstance(handler, PrefectConsoleHandler):
                logger.removeHandler(handler)
