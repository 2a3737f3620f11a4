"""Prefect's temporary server: our settings hold although Prefect was imported before, and runs start
theirs in turn."""

from __future__ import annotations

import fcntl
import http.server
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import prefect
import pytest

from flows.execution import server
from flows.execution.server import SETTINGS, _alone, _check_proxies, _own_database
from infra.liveness import STOP_SIGNALS
from tests.e2e.conftest import command_line
from tests.machine import slow

ROOT = Path(__file__).resolve().parents[3]

# Nothing is started: `start` says what it would wait, in a process of its own, since the settings stay.
PROGRAM = """
import fcntl
import flows.execution.flow
from flows.execution.server import start_prefect
from prefect.server.api.server import SubprocessASGIServer
from prefect.settings import get_current_settings

def start(server):
    settings = get_current_settings()
    with open(settings.home / "apertus" / "starting") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another would wait")
    seconds, statistics = settings.server.ephemeral.startup_timeout_seconds, settings.server.analytics_enabled
    raise RuntimeError(f"waited {seconds} s, statistics {statistics}.")

SubprocessASGIServer.start = start
try:
    start_prefect()
except ConnectionError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("chosen", "seconds"),
    [
        pytest.param({}, 300, id="ours", marks=pytest.mark.slow),
        pytest.param({"PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "7"}, 7, id="the user's"),
    ],
)
def test_a_server_starts_alone_with_settings_that_hold_after_prefect_was_imported(
    chosen: dict[str, str], seconds: int, tmp_path: Path
) -> None:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in SETTINGS and name != "PREFECT_API_URL"
    } | chosen
    environment["PREFECT_HOME"] = str(tmp_path / "new")
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    assert "another would wait" in ended.stdout
    assert f"waited {seconds} s, statistics False. Fix: run again" in ended.stdout


# In place of the server a process that ends like one whose database cannot be opened.
ENDING = """
import subprocess
from flows.execution.server import start_prefect
from prefect.server.api.server import SubprocessASGIServer

def run(self):
    ending = subprocess.Popen(["sh", "-c", "echo no such revision >&2; exit 3"])
    ending.wait()
    return ending

SubprocessASGIServer._run_uvicorn_command = run
for _ in range(2):
    try:
        start_prefect()
    except ConnectionError as error:
        print(error)
"""


def test_a_server_that_ends_at_each_start_is_an_error_after_some(tmp_path: Path) -> None:
    environment = os.environ | {"PREFECT_HOME": str(tmp_path)}
    environment.pop("PREFECT_API_URL", None)
    ended = subprocess.run(
        [sys.executable, "-c", ENDING], env=environment, capture_output=True, text=True, timeout=120
    )
    assert ended.stdout.count("did not start: it ended at each of 5 starts; its errors are above. Fix") == 2
    assert ended.stderr.count("no such revision") == 10


def test_a_home_of_prefect_that_cannot_be_written_is_an_error_that_names_the_setting(
    tmp_path: Path,
) -> None:
    (tmp_path / "home").write_text("a file")
    home = tmp_path / "home" / ".prefect"
    fix = r"cannot be written \(Not a directory\). Fix: set PREFECT_HOME to a folder that can"
    with pytest.raises(OSError, match=f"Prefect keeps its database in {home}, which {fix}"):
        _own_database(home)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_nobody_else_reads_the_database_whatever_umask_and_the_mode_of_the_home(
    umask: int, tmp_path: Path
) -> None:
    there, new = tmp_path / "there", tmp_path / "new"
    there.mkdir()
    there.chmod(0o755)
    before = os.umask(umask)
    try:
        databases = [_own_database(home) for home in (there, there, new)]
        databases[0].chmod(0o644)
        _own_database(there)
    finally:
        os.umask(before)
    assert [mode(there), mode(new)] == [0o755, 0o700], "a folder that was there may serve other uses"
    for database in databases:
        assert [mode(database.parent), mode(database)] == [0o700, 0o600]


def test_a_run_does_not_wait_for_ever_for_another_that_starts_its_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other may be stopped."""
    with open(tmp_path / "starting", "w") as file, monkeypatch.context() as patched:
        patched.setattr(server, "TURN_SECONDS", 0.3)
        fcntl.flock(file, fcntl.LOCK_EX)
        begun = time.monotonic()
        with _alone(tmp_path):
            assert 0.3 <= time.monotonic() - begun < 30


# Asks a real server. If this user is root, it also asks as another user; the last lines are those answers.
ASKED = """
import os
from pathlib import Path
import httpx
from flows.execution.server import KEYS, start_prefect
from prefect.client.orchestration import get_client
from prefect.server.api.server import SubprocessASGIServer
from specs.redaction import redacted

start_prefect()
server = SubprocessASGIServer()
asked = f"{server.api_url}/flow_runs/filter"
(key,) = {os.environ[name] for name in KEYS}
with get_client(sync_client=True) as client:
    print(client.read_flow_runs())
for auth in (None, ("apertus", "wrong"), tuple(key.split(":"))):
    print(httpx.post(asked, json={}, auth=auth).status_code)
print(len(key) > 40, key in Path(f"/proc/{server.server_process.pid}/cmdline").read_text(), redacted(key))
for file in sorted(Path(os.environ["PREFECT_HOME"]).rglob("prefect*.db*")):
    print(file.name, oct(file.stat().st_mode & 0o777), file.read_bytes().count(key.encode()))
if os.getuid() == 0:
    os.seteuid(65534)
    print(httpx.post(asked, json={}).status_code)
    for path in (f"/proc/{server.server_process.pid}/environ", file):
        try:
            print(open(path).read(9))
        except PermissionError:
            print("closed")
    os.seteuid(0)
"""


@pytest.mark.slow
def test_the_temporary_server_answers_nobody_without_the_key_of_the_run(tmp_path: Path) -> None:
    environment = os.environ | {"PREFECT_HOME": str(tmp_path / "home")}
    environment.pop("PREFECT_API_URL", None)
    program = [sys.executable, "-c", ASKED]
    ended = subprocess.run(program, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    runs, *codes, key = ended.stdout.splitlines()[:5]
    assert (runs, codes) == ("[]", ["401", "401", "200"])
    assert key == "True False <PREFECT_API_AUTH_STRING>"
    files, others = ended.stdout.splitlines()[5:8], ended.stdout.splitlines()[8:]
    assert files == [f"prefect-{prefect.__version__}.db{suffix} 0o600 0" for suffix in ("", "-shm", "-wal")]
    assert others == (["401", "closed", "closed"] if os.getuid() == 0 else [])


KEPT = """
import os
from flows.execution.server import DATABASE, KEYS, start_prefect
from prefect.server.api.server import SubprocessASGIServer
from prefect.settings import get_current_settings

SubprocessASGIServer.start = lambda server: None
start_prefect()
database = get_current_settings().server.database.connection_url.get_secret_value()
print(database.rpartition("/")[2], [os.environ.get(name, "no")[:7] for name in KEYS])
"""


OWN_KEY = {"PREFECT_API_AUTH_STRING": "me:mine"}
OWN_SERVER = {"PREFECT_API_URL": "URL"}
OWN_DATABASE = {"PREFECT_API_DATABASE_CONNECTION_URL": "sqlite+aiosqlite:////tmp/own.db"}


@pytest.mark.parametrize(
    ("stated", "told"),
    [
        slow(OWN_SERVER, "prefect.db ['no', 'no']"),
        pytest.param(OWN_SERVER | OWN_KEY, "prefect.db ['no', 'me:mine']"),
        slow(OWN_KEY | OWN_DATABASE, "own.db ['apertus', 'apertus']"),
    ],
)
def test_a_server_or_a_database_of_the_user_is_used_as_it_is(
    stated: dict[str, str], told: str, tmp_path: Path
) -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as here:
        threading.Thread(target=here.serve_forever, daemon=True).start()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        environment |= {"PREFECT_HOME": str(tmp_path)}
        environment |= {
            name: value.replace("URL", f"http://127.0.0.1:{here.server_port}")
            for name, value in stated.items()
        }
        program = [sys.executable, "-c", KEPT]
        ended = subprocess.run(
            program, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120
        )
        here.shutdown()
    assert ended.stdout == told + "\n", ended.stderr


# In place of the server another process, which only sleeps.
SLEEPING = """
import atexit, os, subprocess, sys, time
from flows.execution import interrupts, server
from infra import liveness
from prefect.server.api.server import SubprocessASGIServer

def run(self):
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "prefect.server"])

def start(self):
    self.server_process = self._run_uvicorn_command()
    atexit.register(self.stop)
    print("up", self.server_process.pid, liveness._guards[0].pid, flush=True)

SubprocessASGIServer._run_uvicorn_command, SubprocessASGIServer.start = run, start
interrupts.listen()
try:
    server.start_prefect()
    time.sleep(600)
except KeyboardInterrupt:
    time.sleep(1)  # in which the server is told how the run ended
    print(SubprocessASGIServer().server_process.poll(), flush=True)
"""


@pytest.mark.parametrize("killed", [False, slow(True)], ids=["told", "killed"])
def test_the_server_and_its_guard_end_after_the_run_and_not_before(tmp_path: Path, killed: bool) -> None:
    """Every signal that ends a run is sent to both, and to the run, if that is not killed."""
    environment = os.environ | {"PREFECT_HOME": str(tmp_path)}
    environment.pop("PREFECT_API_URL", None)
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEPING],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    up, *others = process.stdout.readline().split()
    assert up == "up"
    for number in STOP_SIGNALS:
        for pid in map(int, others):
            os.kill(pid, number)
    if killed:
        process.kill()
    else:
        for number in STOP_SIGNALS:
            process.send_signal(number)
        assert process.stdout.readline() == "None\n", "the server has ended before the run"
    process.wait(20)
    deadline = time.monotonic() + 5
    while any(map(command_line, map(int, others))):
        assert time.monotonic() < deadline, f"of the server and its guard, {others}, one is left"
        time.sleep(0.02)


BEHIND_A_PROXY = """
import http.server, threading, urllib.request
import httpx
from flows.execution.server import start_prefect
from prefect.server.api.server import SubprocessASGIServer

SubprocessASGIServer.start = lambda server: None
start_prefect()
local = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
threading.Thread(target=local.serve_forever, daemon=True).start()
for host in ("127.0.0.1", "localhost"):
    print(httpx.get(f"http://{host}:{local.server_port}/").status_code)
    print(urllib.request.urlopen(f"http://{host}:{local.server_port}/").status)
try:
    httpx.get("http://elsewhere.example/")
except httpx.TransportError as error:
    print("by the proxy:", error)
print("directly:", bool(urllib.request.proxy_bypass("storage.example")))
"""


@pytest.mark.slow
@pytest.mark.parametrize("proxy", ["http_proxy=http", "ALL_PROXY=socks5"])
@pytest.mark.parametrize("stated", [None, "no_proxy", "NO_PROXY"])
def test_a_proxy_is_not_asked_for_this_machine(stated: str | None, proxy: str, tmp_path: Path) -> None:
    variable, scheme = proxy.split("=")
    if scheme == "socks5":
        pytest.importorskip("socksio", reason="`make setup` adds it")
    environment = {key: value for key, value in os.environ.items() if key.lower() != "no_proxy"}
    environment |= {"PREFECT_HOME": str(tmp_path), variable: f"{scheme}://127.0.0.1:9"}  # nobody answers
    environment |= {stated: "storage.example"} if stated else {}
    program = [sys.executable, "-c", BEHIND_A_PROXY]
    ended = subprocess.run(program, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    *answers, elsewhere, others = ended.stdout.splitlines()
    assert answers == ["200"] * 4
    assert elsewhere == "by the proxy: [Errno 111] Connection refused"
    assert others == f"directly: {stated is not None}"


@pytest.mark.parametrize(
    ("variable", "url", "told"),
    [
        ("ALL_PROXY", "socks://127.0.0.1:9", "Unknown scheme for proxy URL"),
        ("https_proxy", "http://127.0.0.1:port", "Invalid port: 'port'"),
        ("all_proxy", "socks5://127.0.0.1:9", "'socksio' package is not installed"),
    ],
)
def test_a_proxy_that_no_client_can_use_is_an_error_that_names_its_variable(
    variable: str, url: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, url)
    monkeypatch.setitem(sys.modules, "socksio", None)
    with pytest.raises(ConnectionError, match=rf"{told}.*Fix: correct or unset .*{variable}"):
        _check_proxies()
